"""Transports: bytes to and from a board, and a clock for waits."""

from __future__ import annotations

import errno
import os
import select
import time
from typing import Protocol

import serial

from nearstep.serial.errors import (
    PortBusyError,
    PortError,
    PortLostError,
    PortNotFoundError,
    PortPermissionError,
)

BITS_A_BYTE = 10
"""Start bit, eight bits, stop bit."""

STUCK_SECONDS = 5.0
"""Seconds in which a port accepts no byte, after which it counts as lost; there is no flow control.
"""

WRITTEN_BYTES = 2048
"""Bytes of a write to the port; at 9600 baud they take 2 s."""

MAY_BE = "requests in flight may have been executed"


class Transport(Protocol):
    """A line, for a link.

    Attributes
    ----------
    port : its name, for errors.
    baud : bits a second; 0 if bytes take no time.
    """

    port: str
    baud: int

    @property
    def now(self) -> float:
        """Seconds of the clock by which `read` waits."""

    def write(self, data: bytes) -> None:
        """Send bytes."""

    def read(self, seconds: float) -> bytes:
        """Return received bytes; if there are none, wait at most `seconds` for the first."""

    def close(self) -> None:
        """Close the line. Closing twice does nothing."""


class SerialPort:
    """A serial port of this machine, opened exclusively.

    Parameters
    ----------
    port : its path, such as `/dev/ttyUSB0`.

    Raises
    ------
    PortError : the path is no serial port, or the port does not support the baud rate.
    """

    def __init__(self, port: str, baud: int) -> None:
        self.port = port
        self.baud = baud
        self._come = bytearray()  # while bytes were written
        try:
            self._serial = serial.Serial(port, baud, timeout=0, exclusive=True)
            os.set_blocking(self._serial.fileno(), False)
        except (OSError, ValueError) as error:
            raise _why(port, error) from error

    @property
    def now(self) -> float:
        return time.monotonic()

    def write(self, data: bytes) -> None:
        """Send bytes as `Transport.write`; bytes received meanwhile are kept for `read`."""
        left = memoryview(data)
        until = self.now + STUCK_SECONDS
        try:
            port = self._serial.fileno()
            while left:
                wait = max(0.0, until - self.now)
                readable, writable, _ = select.select([port], [port], [], wait)
                if readable:
                    self._come += self._serial.read(max(1, self._serial.in_waiting))
                if writable and (sent := _written(port, left[:WRITTEN_BYTES])):
                    left = left[sent:]
                    until = self.now + STUCK_SECONDS
                elif self.now >= until:
                    reason = f"the port accepted no bytes for {STUCK_SECONDS:g} s"
                    raise PortLostError(self.port, f"{reason}; {MAY_BE}")
        except (OSError, TypeError, ValueError) as error:  # the last two if it was closed meanwhile
            raise self._lost(error) from error

    def read(self, seconds: float) -> bytes:
        try:
            if not self._come:
                ready, _, _ = select.select([self._serial.fileno()], [], [], max(0.0, seconds))
                if not ready:
                    return b""
                self._come += self._serial.read(max(1, self._serial.in_waiting))
        except (OSError, TypeError, ValueError) as error:
            raise self._lost(error) from error
        data = bytes(self._come)
        self._come.clear()
        return data

    def close(self) -> None:
        self._serial.close()

    def _lost(self, error: Exception) -> PortLostError:
        return PortLostError(self.port, f"the port has vanished ({error}); {MAY_BE}")


def _written(port: int, data: memoryview) -> int:
    """Return how many of these bytes the port has accepted."""
    try:
        return os.write(port, data)
    except BlockingIOError:
        return 0


def _why(port: str, error: Exception) -> PortError:
    """Return the error for a port that could not be opened."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOENT, errno.ENXIO, errno.ENODEV):
        return PortNotFoundError(port, "there is no such port")
    if number in (errno.EACCES, errno.EPERM):
        reason = "permission denied; on Linux the port's group, often dialout, may open it"
        return PortPermissionError(port, reason)
    if number in (errno.EBUSY, errno.EWOULDBLOCK):
        return PortBusyError(port, "another program has the port open")
    return PortError(port, str(error))
