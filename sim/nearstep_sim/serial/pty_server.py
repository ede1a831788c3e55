"""A pseudo-terminal connected to a board: `serial:` opens it like any other port."""

from __future__ import annotations

import os
import select
import threading
import tty
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from nearstep_sim.serial.line import Noise, NoisyLine

READ_BYTES = 4096
IDLE_SECONDS = 0.05
"""Longest time between two checks of the line and of `stop`."""

SLICE_SECONDS = 2e-4
"""Simulated time for which a line runs in one call; a byte at 3 Mbaud takes 3.3e-6."""

ACTIVE_SLICES = 100
"""Slices for which a simulated line runs without a pause after a byte."""

MOST_UNREAD = 1 << 16
"""Most unread bytes of a client: more are lost, as after a UART."""


class Wire(Protocol):
    """Bytes to and from a board: see `nearstep.serial.transport.Transport`."""

    def write(self, data: bytes) -> None: ...

    def read(self, seconds: float) -> bytes: ...


class PtyServer:
    """A pseudo-terminal connected to a board, for one client after the other.

    Parameters
    ----------
    wire : the board.
    noise, seed : of both directions.
    link : symbolic link to the terminal, made by the constructor, removed by `close`. None: none.

    Attributes
    ----------
    path : of the terminal.
    down, up : the two directions, with counts of their faults.
    overrun : bytes lost because no client read them.

    Raises
    ------
    FileExistsError : `link` exists and is not a dangling link.
    """

    def __init__(
        self, wire: Wire, *, noise: Noise | None = None, seed: int = 1, link: Path | None = None
    ) -> None:
        self._wire = wire
        self.down = NoisyLine(noise or Noise(), seed)
        self.up = NoisyLine(noise or Noise(), seed + 1)
        self.overrun = 0
        self._unread = bytearray()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._master, slave = os.openpty()
        try:
            tty.setraw(slave)
            self.path = os.ttyname(slave)
            self._link = None if link is None else _made(link, self.path)
        except BaseException:
            os.close(self._master)
            raise
        finally:
            os.close(slave)  # so that the end of the only client is seen
        os.set_blocking(self._master, False)

    def serve(self) -> None:
        """Transfer bytes until `stop`."""
        poll = select.poll()
        idle = ACTIVE_SLICES
        while not self._stop.is_set():
            active = idle < ACTIVE_SLICES
            wanted = select.POLLIN | (select.POLLOUT if self._unread else 0)
            poll.register(self._master, wanted)
            events = poll.poll(0 if active else 1e3 * IDLE_SECONDS)
            flags = events[0][1] if events else 0
            if flags & select.POLLIN:
                self._wire.write(self.down.carry(os.read(self._master, READ_BYTES)))
                idle = 0
            elif flags & select.POLLHUP:
                self._unread.clear()
                self._stop.wait(IDLE_SECONDS)
            data = self._wire.read(SLICE_SECONDS)
            idle = 0 if data else idle + 1
            self._give(self.up.carry(data))

    def start(self) -> Self:
        """Serve in a thread, and return self."""
        self._thread = threading.Thread(target=self.serve, name=f"pty {self.path}", daemon=True)
        self._thread.start()
        return self

    def stop(self) -> None:
        """Make `serve` return; may be called by a signal handler."""
        self._stop.set()

    def close(self) -> None:
        """Stop, and remove the terminal, which a client loses. A second call does nothing."""
        self.stop()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._master >= 0:
            os.close(self._master)
            self._master = -1
            if self._link is not None and _target(self._link) == self.path:
                self._link.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _give(self, data: bytes) -> None:
        """Send as many bytes as the client accepts; keep the others."""
        room = MOST_UNREAD - len(self._unread)
        self.overrun += max(0, len(data) - room)
        self._unread += data[:room]
        if self._unread:
            try:
                sent = os.write(self._master, self._unread)
            except BlockingIOError:
                return
            del self._unread[:sent]


def _made(link: Path, target: str) -> Path:
    """Make a symbolic link, replacing a dangling one."""
    if link.is_symlink() and not link.exists():
        link.unlink()
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target)
    return link


def _target(link: Path) -> str | None:
    try:
        return os.readlink(link)
    except OSError:
        return None
