"""Initialisation of LiteDRAM's memory controllers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np

from nearstep.serial.controllers import BoardAccess
from nearstep.serial.errors import MemoryNotReadyError
from nearstep_spec.csr.model import WORD_BYTES

TESTED_BYTES = 64
"""Bytes tested at each end of memory, and at every power of two between."""

SEED = 20

HARDWARE = 1
"""Value of `sdram_dfii_control`: the controller has the memory, not the host."""

COMMAND: Mapping[str, int] = MappingProxyType(
    {"CS": 1, "WE": 2, "CAS": 4, "RAS": 8, "WRDATA": 16, "RDDATA": 32}
)
"""Bits of the registers `sdram_dfii_pi*_command`."""

PATTERNS = 3
"""Bursts that must be right at a delay."""

WORDS_A_PHASE = 2
"""Registers that hold the data of a phase: four beats of 16 bits."""


def initialise_sdr(board: BoardAccess) -> None:
    """Initialise an SDRAM by the steps of the manifest, and check that it keeps data.

    Raises
    ------
    MemoryNotReadyError : memory does not keep data.
    """
    _do_steps(board)
    check_memory(board)


def initialise_ddr3(board: BoardAccess) -> None:
    """Initialise a DDR3 SDRAM by the steps of the manifest, find the delays of its data pins, and
    check that memory keeps data.

    During the search every command is a request over the line: a row is open for longer than the
    standard allows in normal use.

    Raises
    ------
    MemoryNotReadyError : there is no delay at which a byte of the data pins is read as it was
        written, or memory does not keep data.

    Ref: the read levelling of LiteDRAM's software, liblitedram of LiteX.
    """
    _do_steps(board)
    phy = _Phy(board)
    for lane in range(phy.lanes):
        phy.level(lane)
    phy.write("sdram_dfii_control", HARDWARE)
    phy.write("ddrctrl_init_done", 1)
    check_memory(board)


def longest(working: Sequence[Sequence[bool]]) -> tuple[int, int] | None:
    """Return the middle of the first longest run of `True`, as number of the sequence and index in
    it; None if there is no run."""
    best: tuple[int, int] | None = None
    most = 0
    for number, row in enumerate(working):
        first = 0
        for at, works in enumerate((*row, False)):
            if works:
                continue
            if at - first > most:
                most, best = at - first, (number, (first + at - 1) // 2)
            first = at + 1
    return best


class _Phy:
    """The PHY of a DDR3 SDRAM under control of the host: commands, a row for tests, and the delays
    of the data pins."""

    def __init__(self, board: BoardAccess) -> None:
        self._board = board
        self._known = board.manifest.controller_data
        self.lanes = self._known["lanes"]
        self._phases = range(self._known["nphases"])
        self._random = np.random.default_rng(SEED)

    def write(self, name: str, value: int, word: int = 0) -> None:
        address = self._known[name] + WORD_BYTES * word
        self._board.controller.write_register(address, value)

    def level(self, lane: int) -> None:
        """Set a lane to the middle of the delays at which its data is right.

        Raises
        ------
        MemoryNotReadyError : there is no such delay.
        """
        self.write("ddrphy_dly_sel", 1 << lane)
        working = []
        for bitslip in range(self._known["bitslips"]):
            self._set(bitslip, 0)
            row = []
            for _ in range(self._known["delays"]):
                row.append(all(self._reads_right(lane) for _ in range(PATTERNS)))
                self.write("ddrphy_rdly_dq_inc", 1)
            working.append(row)
        found = longest(working)
        if found is None:
            raise MemoryNotReadyError(
                f"memory of {self._board.manifest.board}: byte {lane} of the data pins reads "
                f"written data at none of {len(working)} x {len(working[0])} delays"
            )
        self._set(*found)
        self.write("ddrphy_dly_sel", 0)

    def _set(self, bitslip: int, delay: int) -> None:
        for kind, times in (("bitslip_rst", 1), ("bitslip", bitslip), ("rst", 1), ("inc", delay)):
            for _ in range(times):
                self.write(f"ddrphy_rdly_dq_{kind}", 1)

    def _reads_right(self, lane: int) -> bool:
        """Whether a lane of a burst reads as it was written."""
        nbytes = len(self._phases) * WORDS_A_PHASE * WORD_BYTES
        written = self._random.integers(0, 256, nbytes, np.uint8)
        words = written.view(">u4").reshape(len(self._phases), WORDS_A_PHASE)
        self._command(0, "RAS", "CS")
        for phase in self._phases:
            for word, value in enumerate(words[phase]):
                self.write(f"sdram_dfii_pi{phase}_wrdata", int(value), word)
        self._command(self._known["wrphase"], "CAS", "WE", "CS", "WRDATA")
        self.write("ddrphy_burstdet_clr", 1)
        self._command(self._known["rdphase"], "CAS", "CS", "RDDATA")
        self._command(0, "RAS", "WE", "CS")
        read = np.array(
            [
                [
                    self._board.controller.read_register(
                        self._known[f"sdram_dfii_pi{phase}_rddata"] + WORD_BYTES * word
                    )
                    for word in range(WORDS_A_PHASE)
                ]
                for phase in self._phases
            ],
            ">u4",
        ).view(np.uint8)
        seen = self._board.controller.read_register(self._known["ddrphy_burstdet_seen"])
        # The most significant byte of a phase comes first: the highest lane of the last beat.
        mine = slice(self.lanes - 1 - lane, None, self.lanes)
        same = np.array_equal(read.reshape(-1)[mine], written[mine])
        return same and bool(seen >> lane & 1)

    def _command(self, phase: int, *pins: str) -> None:
        name = f"sdram_dfii_pi{phase}_"
        self.write(f"{name}address", 0)
        self.write(f"{name}baddress", 0)
        self.write(f"{name}command", sum(COMMAND[pin] for pin in pins))
        self.write(f"{name}command_issue", 1)


def _do_steps(board: BoardAccess) -> None:
    for step in board.manifest.controller_steps:
        board.controller.write_register(step.address, step.value)
        if step.cycles:
            board.backend.advance(step.cycles)


def check_memory(board: BoardAccess) -> None:
    """Write different bytes to parts of memory, then read all of them.

    The parts are at the powers of two, so that one overwrites another if an address bit is wrong.

    Raises
    ------
    MemoryNotReadyError : the error has the first wrong address, and its contents.
    """
    limit, first = board.manifest.memory_bytes, (TESTED_BYTES - 1).bit_length()
    places = [0, *(1 << bit for bit in range(first, limit.bit_length() - 1))]
    places.append(limit - TESTED_BYTES)
    random = np.random.default_rng(SEED)
    written = [random.integers(0, 256, TESTED_BYTES, np.uint8) for _ in places]
    for place, data in zip(places, written, strict=True):
        board.backend.write_memory(place, data)
    read = np.empty(TESTED_BYTES, np.uint8)
    for place, data in zip(places, written, strict=True):
        board.backend.read_memory(place, read)
        for at in np.flatnonzero(read != data)[:1]:
            raise MemoryNotReadyError(
                f"memory of {board.manifest.board} does not keep data: at "
                f"{place + int(at):#x} there must be {data[at]:#x}, not {read[at]:#x}"
            )
