"""Bytes to and from a board, and the time by which waits are counted."""

from __future__ import annotations

import errno
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
"""A port that takes no byte for so long counts as lost; there is no flow control."""

WRITTEN_BYTES = 2048
"""Bytes that have so long together; at 9600 baud they take 2 s."""


class Transport(Protocol):
    """What a link needs of a line.

    Attributes
    ----------
    port : its name, for errors.
    baud : bits a second; 0 if bytes take no time.
    """

    port: str
    baud: int

    @property
    def now(self) -> float:
        """Seconds, of the clock by which `read` waits."""

    def write(self, data: bytes) -> None:
        """Send bytes.

        Raises
        ------
        PortLostError
        """

    def read(self, seconds: float) -> bytes:
        """What has come; if that is nothing, wait for a byte, at most so long.

        Raises
        ------
        PortLostError
        """

    def close(self) -> None:
        """Give the line back. Closing twice does nothing."""


class SerialPort:
    """A serial port of this machine, which no other program may open meanwhile.

    Parameters
    ----------
    port : its path, such as `/dev/ttyUSB0`.
    baud

    Raises
    ------
    PortNotFoundError, PortPermissionError, PortBusyError
    PortError : it is no serial port, or does not have the baud rate.
    """

    def __init__(self, port: str, baud: int) -> None:
        self.port = port
        self.baud = baud
        try:
            self._serial = serial.Serial(
                port, baud, timeout=0, write_timeout=STUCK_SECONDS, exclusive=True
            )
        except (OSError, ValueError) as error:
            raise _why(port, error) from error

    @property
    def now(self) -> float:
        return time.monotonic()

    def write(self, data: bytes) -> None:
        try:
            for at in range(0, len(data), WRITTEN_BYTES):
                self._serial.write(data[at : at + WRITTEN_BYTES])
        except serial.SerialTimeoutException as error:
            reason = f"the port took no bytes for {STUCK_SECONDS:g} s"
            raise PortLostError(self.port, reason) from error
        except (OSError, TypeError) as error:  # the second if it was closed under the call
            raise self._lost(error) from error

    def read(self, seconds: float) -> bytes:
        try:
            ready, _, _ = select.select([self._serial.fileno()], [], [], max(0.0, seconds))
            if not ready:
                return b""
            data: bytes = self._serial.read(max(1, self._serial.in_waiting))
            return data
        except (OSError, TypeError, ValueError) as error:
            raise self._lost(error) from error

    def close(self) -> None:
        self._serial.close()

    def _lost(self, error: Exception) -> PortLostError:
        return PortLostError(self.port, f"the port went away ({error})")


def _why(port: str, error: Exception) -> PortError:
    """What it means that a port could not be opened."""
    number = getattr(error, "errno", None)
    if number in (errno.ENOENT, errno.ENXIO, errno.ENODEV):
        return PortNotFoundError(port, "there is no such port")
    if number in (errno.EACCES, errno.EPERM):
        reason = "permission denied; on Linux its group, often dialout, may open it"
        return PortPermissionError(port, reason)
    if number in (errno.EBUSY, errno.EWOULDBLOCK):
        return PortBusyError(port, "another program has it")
    return PortError(port, str(error))
