"""Initialisation of LiteDRAM's controllers, on a board whose pads are some lines of Python."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import pytest

from nearstep.serial.errors import MemoryNotReadyError
from nearstep.serial.litedram import check_memory, initialise_ddr3, longest
from nearstep_spec.serial.manifest import Manifest, Step

LANES, DELAYS, BITSLIPS, PHASES = 2, 8, 4, 2
NAMES = (
    *("ddrctrl_init_done", "ddrphy_dly_sel", "ddrphy_rdly_dq_rst", "ddrphy_rdly_dq_inc"),
    *("ddrphy_rdly_dq_bitslip_rst", "ddrphy_rdly_dq_bitslip", "ddrphy_burstdet_clr"),
    *("ddrphy_burstdet_seen", "sdram_dfii_control"),
    *(
        f"sdram_dfii_pi{phase}_{name}"
        for phase in range(PHASES)
        for name in ("command", "command_issue", "address", "baddress", "wrdata", "rddata")
    ),
)
ADDRESSES = {name: 16 * number for number, name in enumerate(NAMES)}
MANIFEST = Manifest(
    board="pads",
    family="smartssd",
    config={},
    map_hashes={},
    memory_bytes=1 << 16,
    regions=((0, 1 << 16),),
    controller="litedram-ddr3",
    controller_steps=(Step(ADDRESSES["sdram_dfii_control"], 14, 100),),
    controller_data=ADDRESSES
    | {"lanes": LANES, "nphases": PHASES, "rdphase": 0, "wrphase": 1}
    | {"delays": DELAYS, "bitslips": BITSLIPS},
)
WINDOWS = {0: (2, 1, 4), 1: (0, 5, 7)}
"""Of each lane: the bitslip, and the first and the last delay, at which it reads what is there."""


@dataclass
class Pads:
    """A board: registers of its controller, one row of a memory, and memory itself."""

    windows: dict[int, tuple[int, int, int]]
    manifest: Manifest = MANIFEST
    registers: dict[int, int] = field(default_factory=dict)
    bitslip: list[int] = field(default_factory=lambda: [0] * LANES)
    delay: list[int] = field(default_factory=lambda: [0] * LANES)
    burst: bytes = bytes(16)
    is_open: bool = False
    waited: int = 0
    bursts: int = 0
    wrong_bit: int | None = None  # of the address of memory, which is always 0

    def __post_init__(self) -> None:
        self.memory = np.zeros(self.manifest.memory_bytes, np.uint8)
        self.controller = self.backend = self

    def advance(self, cycles: int) -> None:
        self.waited += cycles

    def read_register(self, address: int) -> int:
        return self.registers.get(address, 0)

    def write_register(self, address: int, value: int) -> None:
        self.registers[address] = value
        name = {ADDRESSES[name]: name for name in NAMES}.get(address, "")
        chosen = [i for i in range(LANES) if self.named("ddrphy_dly_sel") >> i & 1]
        for lane in chosen:
            if name == "ddrphy_rdly_dq_rst":
                self.delay[lane] = 0
            elif name == "ddrphy_rdly_dq_inc":
                self.delay[lane] = (self.delay[lane] + 1) % DELAYS
            elif name == "ddrphy_rdly_dq_bitslip_rst":
                self.bitslip[lane] = 0
            elif name == "ddrphy_rdly_dq_bitslip":
                self.bitslip[lane] = (self.bitslip[lane] + 1) % BITSLIPS
        if name == "ddrphy_burstdet_clr":
            self.registers[ADDRESSES["ddrphy_burstdet_seen"]] = 0
        if name.endswith("command_issue"):
            self.issue(self.named(name.removesuffix("_issue")))

    def named(self, name: str) -> int:
        return self.registers.get(ADDRESSES[name], 0)

    def issue(self, command: int) -> None:
        assert self.named("sdram_dfii_control") == 14  # the host has the memory
        ras, cas, write = command & 8, command & 4, command & 2
        if ras and not cas:
            assert self.is_open == bool(write)
            self.is_open = not write
            return
        assert self.is_open
        if write:
            assert command & 16
            self.burst = b"".join(
                self.named_word(phase, "wrdata", word).to_bytes(4, "big")
                for phase in range(PHASES)
                for word in range(2)
            )
            return
        assert command & 32
        self.bursts += 1
        shown, seen = bytearray(self.burst), 0
        for lane, (bitslip, first, last) in self.windows.items():
            if self.bitslip[lane] == bitslip and first <= self.delay[lane] <= last:
                seen |= 1 << lane
                continue
            for at in range(LANES - 1 - lane, len(shown), LANES):
                shown[at] ^= 0x10
        self.registers[ADDRESSES["ddrphy_burstdet_seen"]] = seen
        for number in range(4):
            address = ADDRESSES[f"sdram_dfii_pi{number // 2}_rddata"] + 4 * (number % 2)
            self.registers[address] = int.from_bytes(shown[4 * number : 4 * number + 4], "big")

    def named_word(self, phase: int, name: str, word: int) -> int:
        return self.registers.get(ADDRESSES[f"sdram_dfii_pi{phase}_{name}"] + 4 * word, 0)

    def place(self, address: int) -> int:
        return address if self.wrong_bit is None else address & ~(1 << self.wrong_bit)

    def write_memory(self, address: int, data: np.ndarray) -> None:
        at = self.place(address)
        self.memory[at : at + data.size] = data

    def read_memory(self, address: int, out: np.ndarray) -> None:
        at = self.place(address)
        out[:] = self.memory[at : at + out.size]


def test_delays_are_set_to_the_middle_of_where_data_is_right() -> None:
    pads = Pads(WINDOWS)
    initialise_ddr3(pads)
    for lane, (bitslip, first, last) in WINDOWS.items():
        assert (pads.bitslip[lane], pads.delay[lane]) == (bitslip, (first + last) // 2)
    assert pads.named("sdram_dfii_control") == 1
    assert pads.named("ddrctrl_init_done") == 1
    assert pads.waited == 100
    assert not pads.is_open
    assert pads.bursts >= LANES * BITSLIPS * DELAYS


@pytest.mark.parametrize("lane", range(LANES))
def test_a_lane_that_never_reads_right_is_named(lane: int) -> None:
    pads = Pads(WINDOWS | {lane: (0, 1, 0)})
    with pytest.raises(MemoryNotReadyError, match=f"pads: byte {lane} of .* at none"):
        initialise_ddr3(pads)
    assert pads.named("ddrctrl_init_done") == 0


@pytest.mark.parametrize("bit", range(6, 16))
def test_an_address_pin_that_is_stuck_is_found(bit: int) -> None:
    pads = Pads(WINDOWS, wrong_bit=bit)
    with pytest.raises(MemoryNotReadyError, match="does not keep data: at 0x"):
        check_memory(pads)


def test_the_longest_row_is_taken_at_its_middle() -> None:
    yes, no = True, False
    for rows, middle in (
        ([[no, no], [no, no]], None),
        ([[yes]], (0, 0)),
        ([[yes, no, yes, yes], [yes, yes, yes, no]], (1, 1)),
        ([[no, yes, yes, no], [yes, yes, no, no]], (0, 1)),
        ([[no, no, no, yes], [no, no, no, no]], (0, 3)),
    ):
        assert longest(rows) == middle
