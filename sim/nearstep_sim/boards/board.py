"""`sim:board`: the whole top of a board, Verilated, behind its serial line."""

from __future__ import annotations

import ctypes
import os
import weakref
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import ClosedDeviceError, ForkedDeviceError
from nearstep.serial.backend import LinkBackend
from nearstep.serial.link import Link
from nearstep_sim.boards.library import HARNESS, board_library
from nearstep_sim.boards.options import SimulatedBoardOptions
from nearstep_sim.models.sdram.chip import CHIPS, CSdramInjection, CSdramShape, CSdramTiming
from nearstep_sim.verilate.abi import load, structure, values
from nearstep_sim.verilate.harness import FaultRecord

PICOSECONDS = 10**12
TURN = 360
RESET_CYCLES = 8
ANSWER_BYTES = 4096
"""Most bytes taken from the simulation at a time."""

OUT_DELAY, IN_DELAY = 3000, 1500
"""Approximate delays of pads in picoseconds: an output register to its pin, a pin to its input
register.
"""

CBoardOptions = structure(
    "boards/board.cpp",
    "BoardOptions",
    types={"SdramTiming": CSdramTiming, "SdramShape": CSdramShape},
)
CCounters = structure("boards/board.cpp", "BoardCounters")


@dataclass(frozen=True, kw_only=True)
class BoardCounts:
    """Counters of a simulated board.

    Attributes
    ----------
    cycles : of the design.
    reads, writes, refreshes : of the SDRAM chip; words.
    framing_errors : bytes from the board without a stop bit.
    """

    cycles: int
    reads: int
    writes: int
    refreshes: int
    framing_errors: int


class BoardLine:
    """The far end of a simulated board's line, and the board: bits take device cycles, and time
    passes only during `read` and `run`.

    Attributes
    ----------
    port, baud : see `nearstep.serial.transport.Transport`.
    memory : direct access to the SDRAM chip: words by address; empty with block RAM.
    """

    def __init__(self, options: SimulatedBoardOptions) -> None:
        config = options.design
        board = config.described
        self.port = f"sim:board?board={config.board}&memory={config.memory}"
        self.baud = config.link_baud
        self._clock_hz = board.system_hz
        words = board.memory_bytes // 2 if config.memory == "dram" else 0
        self.memory: NDArray[np.uint16] = np.zeros(words, np.uint16)
        self._lib = lib = load(board_library(config, native=options.fu == "native"), HARNESS)
        period = PICOSECONDS // board.system_hz
        given = CBoardOptions(
            clock_hz=board.system_hz,
            baud=self.baud,
            seed=options.seed,
            reset_cycles=RESET_CYCLES,
            phase=period * board.clock.phase // TURN,
            out_delay=OUT_DELAY,
            in_delay=IN_DELAY,
            words=self.memory.ctypes.data,
        )
        if words:
            chip = CHIPS[board.memory_module]
            given.timing, given.shape = chip.timing(period), chip.shape()
        self._process = os.getpid()
        self._board: int | None = lib.board_open(ctypes.byref(given))
        self._end = weakref.finalize(self, close_here, os.getpid(), lib.board_close, self._board)
        self._end.atexit = False
        self._buffer = (ctypes.c_uint8 * ANSWER_BYTES)()

    @property
    def now(self) -> float:
        return int(self._lib.board_cycle(self._handle)) / self._clock_hz

    @property
    def counts(self) -> BoardCounts:
        """Return the counters since the board was opened."""
        found = CCounters()
        self._lib.board_counters(self._handle, ctypes.byref(found))
        return BoardCounts(**values(found))

    def write(self, data: bytes) -> None:
        self._lib.board_send(self._handle, data, len(data))

    def read(self, seconds: float) -> bytes:
        """Receive bytes within a timeout; see `Transport`.

        Raises
        ------
        ProtocolError : a rule of the SDRAM chip was broken. The board has stopped.
        """
        return self._run(int(seconds * self._clock_hz) + 1, ANSWER_BYTES, any=True)

    def run(self, cycles: int) -> bytes:
        """Run the board, and return the received bytes.

        Raises
        ------
        ProtocolError
        """
        return self._run(cycles, ANSWER_BYTES, any=False)

    def press_reset(self) -> None:
        """Reset the board by its button, at any time.

        Contents of block RAM are kept; contents of an SDRAM are undefined, since it is not
        refreshed until the host has initialised it again.
        """
        self._lib.board_reset(self._handle)

    def inject(self, *, reads: int = 0, times: int = 1, flip: int = 0, row: int = 0) -> None:
        """Make the SDRAM chip return wrong data from now on.

        Parameters
        ----------
        reads : correct reads before the first wrong one.
        times : number of wrong reads.
        flip : bits of data words to invert.
        row : bits of row numbers to invert.
        """
        injection = CSdramInjection(reads=reads, times=times, flip=flip, row=row)
        self._lib.board_inject(self._handle, ctypes.byref(injection))

    def close(self) -> None:
        self._board = None
        self._end()

    @property
    def _handle(self) -> int:
        if self._board is None:
            raise ClosedDeviceError(self.port, "use the simulation")
        if os.getpid() != self._process:
            raise ForkedDeviceError(f"a board, {self.port}", "use the simulation", self._process)
        return self._board

    def _run(self, cycles: int, room: int, *, any: bool) -> bytes:
        come = self._lib.board_run(self._handle, cycles, self._buffer, room, any)
        fault = FaultRecord()
        if self._lib.board_fault(self._handle, ctypes.byref(fault)):
            raise fault.error(())
        return bytes(self._buffer[:come])


class BoardBackend(LinkBackend):
    """A board simulated cycle by cycle, driven over its link.

    Attributes
    ----------
    wire : the board's line.
    """

    def __init__(self, options: SimulatedBoardOptions) -> None:
        self.wire = BoardLine(options)
        super().__init__(Link(self.wire), options.design.board)


def close_here(process: int, close: object, handle: int) -> None:
    """Call `close(handle)` if this is the process of that number."""
    assert callable(close)
    if os.getpid() == process:  # a child after fork() has a copy
        close(handle)
