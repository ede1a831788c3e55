"""`sim:board?design=coarse`: boards joined by cables, Verilated, each behind its serial line."""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass

from nearstep.errors import ArgumentError, ClosedDeviceError, ForkedDeviceError
from nearstep.scalars import is_whole
from nearstep.serial.backend import LinkBackend
from nearstep.serial.link import Link
from nearstep.serial.ring import BoardRing
from nearstep_sim.boards.board import ANSWER_BYTES, RESET_CYCLES, close_here
from nearstep_sim.boards.library import RING, ring_library
from nearstep_sim.boards.options import SimulatedRingOptions
from nearstep_sim.verilate.abi import load, structure, values

CRingOptions = structure("boards/ring.cpp", "RingOptions")
CCableCounters = structure("boards/ring.cpp", "CableCounters")

OF = 1 << 16
"""Scale of probabilities in the simulation."""


@dataclass(frozen=True, kw_only=True)
class CableCounts:
    """Traffic of one direction of a cable.

    Attributes
    ----------
    transfers : changes of the strobe.
    hit : transfers in which a pin had the wrong level.
    """

    transfers: int
    hit: int


class SimulatedRing:
    """Boards with separate clocks, and the cables between them.

    Time passes for all boards during a wait for bytes of one. Link i connects port 1 of board i to
    port 0 of the next; its direction 0 is from board i to the next.
    """

    def __init__(self, options: SimulatedRingOptions) -> None:
        config = options.boards
        self.config = config
        self.devices = options.devices
        self._lib = lib = load(ring_library(config), RING)
        given = CRingOptions(
            boards=options.devices,
            clock_hz=config.described.system_hz,
            baud=config.link_baud,
            seed=options.seed,
            reset_cycles=RESET_CYCLES,
            ppm=options.ppm,
            corrupt=round(options.corrupt * OF),
        )
        self._process = os.getpid()
        self._ring: int | None = lib.ring_open(ctypes.byref(given))
        self._end = weakref.finalize(self, close_here, os.getpid(), lib.ring_close, self._ring)
        self._end.atexit = False
        self._buffer = (ctypes.c_uint8 * ANSWER_BYTES)()

    @property
    def links(self) -> int:
        """Number of cables; two boards share one."""
        return 1 if self.devices == 2 else self.devices

    def counts(self, link: int, direction: int) -> CableCounts:
        """Return the counters since the boards were opened."""
        found = CCableCounters()
        self._lib.ring_counters(self.handle, self._number(link, direction), ctypes.byref(found))
        return CableCounts(**values(found))

    def corrupt(self, link: int, direction: int, *, after: int = 0, times: int = 1) -> None:
        """Corrupt `times` transfers, after `after` others from now on."""
        self._lib.ring_arm(self.handle, self._number(link, direction), after, times)

    def pull(self, link: int) -> None:
        """Disconnect the cable of a link: its pins are low on both boards."""
        self._lib.ring_plug(self.handle, self._number(link, 0) // 2, False)

    def plug(self, link: int) -> None:
        """Reconnect the cable of a link."""
        self._lib.ring_plug(self.handle, self._number(link, 0) // 2, True)

    def cycle(self, board: int) -> int:
        """Clock cycles of a board since it was opened."""
        return int(self._lib.ring_cycle(self.handle, board))

    def send(self, board: int, data: bytes) -> None:
        """Send bytes to a board, after bytes in flight."""
        self._lib.ring_send(self.handle, board, data, len(data))

    def run(self, board: int, cycles: int) -> bytes:
        """Receive bytes from a board within a number of its cycles."""
        come = self._lib.ring_run(self.handle, board, cycles, self._buffer, ANSWER_BYTES)
        return bytes(self._buffer[:come])

    def close(self) -> None:
        """Free the simulation. Closing twice does nothing."""
        self._ring = None
        self._end()

    @property
    def handle(self) -> int:
        """Handle of the simulation in C++.

        Raises
        ------
        ClosedDeviceError, ForkedDeviceError
        """
        name = f"sim:board?design=coarse&devices={self.devices}"
        if self._ring is None:
            raise ClosedDeviceError(name, "use the simulation")
        if os.getpid() != self._process:
            raise ForkedDeviceError(f"boards, {name}", "use the simulation", self._process)
        return self._ring

    def _number(self, link: int, direction: int) -> int:
        if not is_whole(link) or not 0 <= link < self.links:
            raise ArgumentError(f"link must be from 0 to {self.links - 1}, not {link!r}")
        if not is_whole(direction) or direction not in (0, 1):
            raise ArgumentError(f"direction must be 0 or 1, not {direction!r}")
        return 2 * link + direction


class RingLine:
    """The host's end of one board's serial line.

    Parameters
    ----------
    board : number of the board.

    Attributes
    ----------
    port, baud : see `nearstep.serial.transport.Transport`.
    """

    def __init__(self, ring: SimulatedRing, board: int) -> None:
        self.port = f"sim:board?design=coarse, board {board}"
        self.baud = ring.config.link_baud
        self._ring = ring
        self._board = board
        self._clock_hz = ring.config.described.system_hz

    @property
    def now(self) -> float:
        return self._ring.cycle(self._board) / self._clock_hz

    def write(self, data: bytes) -> None:
        self._ring.send(self._board, data)

    def read(self, seconds: float) -> bytes:
        """Receive bytes within a timeout; see `Transport`."""
        return self._ring.run(self._board, int(seconds * self._clock_hz) + 1)

    def close(self) -> None:
        """Do not close the ring, which is closed as a whole."""


class RingBackend(BoardRing):
    """Boards simulated cycle by cycle, each driven over its serial line.

    Attributes
    ----------
    ring : boards and cables.
    """

    def __init__(self, options: SimulatedRingOptions) -> None:
        self.ring = SimulatedRing(options)
        opened: list[LinkBackend] = []
        try:
            for number in range(options.devices):
                line = RingLine(self.ring, number)
                opened.append(LinkBackend(Link(line), options.boards.board))
            super().__init__(opened)
        except BaseException:
            self.ring.close()
            raise

    def close(self) -> None:
        super().close()
        self.ring.close()
