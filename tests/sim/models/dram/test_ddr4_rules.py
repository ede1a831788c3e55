"""Every rule of the DDR4 model: one clock too early trips it by name, the minimum passes.

The minima are typed from JESD79-4 for DDR4-1600 (11-11-11), not read from the timing table.
"""

import contextlib
import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from nearstep_sim.models.dram.device import Ddr4Device, DramViolationError
from nearstep_spec.dram.command import Command, Pins, encode
from nearstep_spec.dram.mode_registers import supported_modes
from nearstep_spec.dram.timing import DramTiming, dram_timing

TREFI = 6240


class Step(NamedTuple):
    """A command at a clock; `x` is the row of ACT or the column of RD and WR."""

    clock: int
    command: str
    bank_group: int = 0
    bank: int = 0
    x: int = 0

    def pins(self) -> Pins:
        return encode(
            Command[self.command],
            bank_group=self.bank_group,
            bank=self.bank,
            row=self.x,
            column=self.x,
        )


class Case(NamedTuple):
    """`steps` end with the command under test at its earliest legal clock; `against` is the step
    it follows by `minimum`."""

    rule: str
    minimum: int
    steps: tuple[Step, ...]
    against: int


def case(rule: str, minimum: int, *steps: Step, against: int = -2) -> Case:
    return Case(rule, minimum, steps, against % len(steps))


S = Step
OPEN = (S(100, "ACT"), S(105, "ACT", 0, 1), S(109, "ACT", 1, 0))

X8 = [
    case("tRCD", 11, S(100, "ACT"), S(111, "RD")),
    case("tRCD", 11, S(100, "ACT"), S(111, "WR")),
    case("tRAS", 28, S(100, "ACT"), S(128, "PRE")),
    case("tRAS", 28, S(100, "ACT"), S(128, "PREA")),
    case("tRP", 11, S(100, "ACT"), S(140, "PRE"), S(151, "ACT")),
    case("tRP", 11, S(100, "ACT"), S(140, "PREA"), S(151, "ACT")),
    case("tRP", 11, S(100, "ACT"), S(140, "PRE"), S(151, "REF")),
    case("tRC", 39, S(100, "ACT"), S(128, "PRE"), S(139, "ACT"), against=0),
    case("tRRD_S", 4, S(100, "ACT"), S(104, "ACT", 1)),
    case("tRRD_L", 5, S(100, "ACT"), S(105, "ACT", 0, 1)),
    case(
        "tFAW",
        20,
        *(S(100, "ACT", 0), S(104, "ACT", 1), S(108, "ACT", 2), S(112, "ACT", 3)),
        S(120, "ACT", 0, 1),
        against=0,
    ),
    case("tCCD_S", 4, *OPEN, S(130, "RD"), S(134, "RD", 1)),
    case("tCCD_L", 5, *OPEN, S(130, "RD"), S(135, "RD", 0, 1)),
    case("tCCD_L", 5, *OPEN, S(130, "RD"), S(135, "RD", 0, 0, 8)),
    case("tCCD_S", 4, *OPEN, S(130, "WR"), S(134, "WR", 1)),
    case("tCCD_L", 5, *OPEN, S(130, "WR"), S(135, "WR", 0, 1)),
    case("tRTW", 8, *OPEN, S(130, "RD"), S(138, "WR")),
    case("tRTW", 8, *OPEN, S(130, "RD"), S(138, "WR", 1)),
    case("tWTR_S", 15, *OPEN, S(130, "WR"), S(145, "RD", 1)),
    case("tWTR_L", 19, *OPEN, S(130, "WR"), S(149, "RD")),
    case("tWTR_L", 19, *OPEN, S(130, "WR"), S(149, "RD", 0, 1)),
    case("tRTP", 6, S(100, "ACT"), S(130, "RD"), S(136, "PRE")),
    case("tRTP", 6, *OPEN, S(140, "RD", 1), S(146, "PREA")),
    case("tWR", 25, S(100, "ACT"), S(130, "WR"), S(155, "PRE")),
    case("tWR", 25, S(100, "ACT"), S(130, "WR"), S(155, "PREA")),
    case("tRFC", 280, S(100, "REF"), S(380, "ACT", 3, 3)),
    case("tRFC", 280, S(100, "REF"), S(380, "REF")),
    case("tRFC", 280, S(100, "REF"), S(380, "PREA")),
    *(
        case(rule, clocks, S(100, first), S(100 + clocks, second))
        for rule, clocks, first, seconds in (
            ("tMRD", 8, "MRS", ("MRS",)),
            ("tMOD", 24, "MRS", ("ACT", "PRE", "PREA", "REF", "ZQCS", "ZQCL")),
            ("tZQCS", 128, "ZQCS", ("ACT", "PRE", "PREA", "REF", "MRS", "ZQCS", "ZQCL")),
            ("tZQoper", 512, "ZQCL", ("ACT", "PRE", "PREA", "REF", "MRS", "ZQCS", "ZQCL")),
            ("tRFC", 280, "REF", ("MRS", "ZQCS", "ZQCL")),
        )
        for second in seconds
    ),
    *(
        case("tRP", 11, S(100, "ACT"), S(140, "PRE"), S(151, quiet))
        for quiet in ("MRS", "ZQCS", "ZQCL")
    ),
]
X16_16GB = [
    case("tRRD_S", 5, S(100, "ACT"), S(105, "ACT", 1)),
    case("tRRD_L", 6, S(100, "ACT"), S(106, "ACT", 0, 1)),
    case(
        "tFAW",
        28,
        *(S(100, "ACT", 0), S(105, "ACT", 1), S(110, "ACT", 0, 1), S(115, "ACT", 1, 1)),
        S(128, "ACT", 0, 2),
        against=0,
    ),
    case("tRFC", 440, S(100, "REF"), S(540, "ACT")),
]
PARTS = {
    "8Gb x8": X8,
    "16Gb x16": X16_16GB,
    "4Gb x8": [case("tRFC", 208, S(9, "REF"), S(217, "ACT"))],
}
CASES = [(part, each) for part, cases in PARTS.items() for each in cases]
NAMES = [f"{part} {c.rule} {c.steps[-2].command}-{c.steps[-1].command}" for part, c in CASES]


def part_timing(part: str) -> DramTiming:
    return dram_timing("DDR4-1600", *part.split())


def play(device: Ddr4Device, *steps: Step) -> None:
    for step in steps:
        device.command(step.clock, step.pins())


@pytest.mark.parametrize(("part", "each"), CASES, ids=NAMES)
def test_the_minimum_passes(part: str, each: Case) -> None:
    device = Ddr4Device(part_timing(part))
    play(device, *each.steps)
    assert device.violation is None
    assert sum(device.counts.values()) == len(each.steps)


@pytest.mark.parametrize(("part", "each"), CASES, ids=NAMES)
def test_one_clock_less_is_a_violation_with_both_commands(part: str, each: Case) -> None:
    assert each.steps[-1].clock - each.steps[each.against].clock == each.minimum
    early = each.steps[-1]._replace(clock=each.steps[-1].clock - 1)
    device = Ddr4Device(part_timing(part))
    play(device, *each.steps[:-1])
    with pytest.raises(DramViolationError) as caught:
        play(device, early)
    found = caught.value
    assert (found.rule, found.minimum) == (each.rule, each.minimum)
    before = each.steps[each.against]
    assert found.previous is not None
    for issued, step in ((found.previous, before), (found.next, early)):
        assert issued.clock == step.clock
        assert issued.command is Command[step.command]
        assert (issued.bank_group, issued.bank) == (step.bank_group, step.bank)
    text = str(found)
    for word in (
        *(each.rule, before.command, str(before.clock), early.command, str(early.clock)),
        f"{each.minimum - 1} clocks, limit {each.minimum}",
    ):
        assert word in text
    # it stays, and everything after it is refused
    with pytest.raises(DramViolationError, match=each.rule):
        device.command(10_000, encode(Command.PREA))


def test_trc_binds_on_its_own_where_it_exceeds_tras_and_trp() -> None:
    timing = dataclasses.replace(part_timing("8Gb x8"), t_rc=45)
    legal = (S(100, "ACT"), S(128, "PRE"), S(145, "ACT"))
    play(Ddr4Device(timing), *legal)
    with pytest.raises(DramViolationError, match=r"tRC: ACT .* at 144 after ACT .* at 100"):
        play(Ddr4Device(timing), *legal[:-1], S(144, "ACT"))


STATE = [
    ("bank closed", (S(100, "RD"),)),
    ("bank closed", (S(100, "ACT"), S(140, "PRE"), S(160, "WR"))),
    ("bank closed", (S(100, "ACT", 1), S(120, "RD"))),
    ("bank open", (S(100, "ACT"), S(200, "ACT", 0, 0, 1))),
    ("bank open", (S(100, "ACT", 2, 1), S(200, "REF"))),
    ("bank open", (S(100, "ACT", 2, 1), S(200, "MRS"))),
    ("bank open", (S(100, "ACT", 2, 1), S(200, "ZQCS"))),
    ("bank open", (S(100, "ACT", 2, 1), S(200, "ZQCL"))),
    ("no such mode register", (S(100, "MRS", 2, 0),)),
    ("bank closed", (S(100, "ACT"), S(130, "RDA"), S(200, "RD"))),
    ("one command a slot", (S(100, "ACT"), S(100, "ACT", 1))),
    ("one command a slot", (S(100, "ACT"), S(99, "ACT", 1))),
    ("column inside a burst", (S(100, "ACT"), S(120, "RD", 0, 0, 4))),
    ("row out of range", (S(100, "ACT", 0, 0, 1 << 16),)),
]


@pytest.mark.parametrize(("rule", "steps"), STATE)
def test_a_state_that_does_not_allow_the_command(rule: str, steps: tuple[Step, ...]) -> None:
    device = Ddr4Device(part_timing("8Gb x8"))
    play(device, *steps[:-1])
    with pytest.raises(DramViolationError) as caught:
        play(device, steps[-1])
    assert caught.value.rule == rule
    assert caught.value.next.clock == steps[-1].clock


def test_x16_has_two_bank_groups() -> None:
    device = Ddr4Device(part_timing("8Gb x16"))
    play(device, S(100, "ACT", 1, 3))
    with pytest.raises(DramViolationError, match="bank out of range"):
        play(device, S(200, "ACT", 2, 0))


def test_the_reserved_code_is_refused() -> None:
    device = Ddr4Device(part_timing("8Gb x8"))
    with pytest.raises(DramViolationError, match="unknown command") as caught:
        device.command(5, Pins(cs_n=0, address=0b011 << 14))
    assert caught.value.next.command is None


# JESD79-4: bits that each register needs for bursts of eight at CL 11 and CWL 9 with data masks.
MODES = {0: 1 << 4, 1: 1, 2: 0, 3: 0, 4: 0, 5: 1 << 10, 6: 0}
# And the bits that then change nothing for column commands, by register: burst order, DLL reset,
# write recovery; drive, termination; ranges of refresh; and so on.
FREE = {
    0: (3, 8, 9, 10, 11, 13),
    1: (1, 2, 5, 6, 8, 9, 10, 13),
    2: (0, 1, 2, 6, 7, 8, 9, 10, 11, 13),
    3: (0, 1, 5, 9, 10, 11, 12, 13),
    4: (0, 9),
    5: (3, 4, 5, 6, 7, 8, 9, 13),
    6: (0, 1, 2, 3, 4, 5, 6, 8, 9, 10, 11, 12, 13),
}
REFRESH_BITS = {3: (6, 7, 8), 4: (2, 3)}


def mode_is_judged(number: int, bits: int) -> tuple[bool, bool]:
    """Whether the model takes a read, and a refresh, after an MRS; and the module's own table."""
    judged = []
    for tail in ((S(200, "ACT"), S(300, "RD")), (S(200, "REF"),)):
        device = Ddr4Device(part_timing("8Gb x8"))
        play(device, S(100, "MRS", number >> 2, number & 3, bits))
        with contextlib.suppress(DramViolationError):
            play(device, *tail)
        found = device.violation
        if found is not None:
            assert (found.rule, found.previous is not None) == ("mode not modelled", True)
            assert (found.previous.clock, found.previous.address) == (100, bits)
        judged.append(found is None)
    return judged[0], judged[1]


@pytest.mark.parametrize("number", MODES)
def test_a_mode_that_is_not_modelled_is_found_where_it_matters(number: int) -> None:
    assert mode_is_judged(number, MODES[number]) == (True, True)
    for bit in range(14):
        reads = bit in FREE[number] or bit in REFRESH_BITS.get(number, ())
        refreshes = bit not in REFRESH_BITS.get(number, ())
        assert mode_is_judged(number, MODES[number] ^ 1 << bit) == (reads, refreshes), bit


def test_the_module_supports_the_modes_that_are_modelled() -> None:
    """Every pattern of the bits of a register against the table that the hardware is made from."""
    rng = np.random.default_rng(12)
    supported = supported_modes(part_timing("8Gb x8"))
    checks = 0
    for number, (mask, value) in enumerate(supported):
        flips = [
            0,
            *(1 << bit for bit in range(14)),
            *(int(x) for x in rng.integers(0, 1 << 14, 50)),
        ]
        for flip in flips:
            bits = MODES[number] ^ flip
            assert (bits & mask == value) == all(mode_is_judged(number, bits)), (number, bits)
            checks += 1
    print(checks, "settings")
    assert checks == 7 * 65


def test_a_mode_can_be_left_again_and_the_clock_driver_is_not_the_dram() -> None:
    device = Ddr4Device(part_timing("8Gb x8"))
    play(device, S(10, "MRS", 0, 1, 1 | 1 << 7), S(40, "MRS", 1, 3, 0x3FFF))
    play(device, S(100, "MRS", 0, 1, 1), S(130, "ACT"), S(141, "RD"))
    assert device.counts[Command.MRS] == 3


def test_deselected_and_nop_slots_are_free() -> None:
    device = Ddr4Device(part_timing("8Gb x8"))
    device.command(7, Pins(cs_n=1, act_n=0))
    device.command(7, Pins(cs_n=0))
    device.issue(7, Command.ACT, row=3)
    assert device.open_row(0, 0) == 3
    assert device.open_row(0, 1) is None


AUTO = [
    # READ at 111: the row stays until tRAS at 128, not only tRTP at 117; then tRP
    ("tRP", (S(100, "ACT"), S(111, "RDA"), S(139, "ACT"))),
    ("tRP", (S(100, "ACT"), S(130, "RDA"), S(147, "ACT"))),  # 130 + tRTP + tRP
    ("tRP", (S(100, "ACT"), S(111, "WRA"), S(147, "ACT"))),  # 111 + 25 + tRP
    ("tRP", (S(100, "ACT"), S(111, "WRA"), S(147, "REF"))),
    # A precharge of an idle bank begins the precharge anew
    ("tRP", (S(100, "ACT"), S(140, "PRE"), S(148, "PRE"), S(159, "ACT"))),
    # A precharge of another bank does not end an automatic one
    ("tRP", (S(100, "ACT"), S(104, "ACT", 1), S(115, "WRA"), S(135, "PRE", 1), S(151, "REF"))),
    ("tWR", (S(100, "ACT"), S(111, "WRA"), S(136, "PRE"))),
]


@pytest.mark.parametrize(("rule", "steps"), AUTO)
def test_automatic_and_repeated_precharge(rule: str, steps: tuple[Step, ...]) -> None:
    timing = dataclasses.replace(part_timing("8Gb x8"), t_rc=30)  # so that tRP is seen alone
    device = Ddr4Device(timing)
    play(device, *steps)
    assert device.violation is None
    early = steps[-1]._replace(clock=steps[-1].clock - 1)
    device = Ddr4Device(timing)
    play(device, *steps[:-1])
    with pytest.raises(DramViolationError) as caught:
        play(device, early)
    assert caught.value.rule == rule


def test_eight_refreshes_may_be_postponed_and_no_more() -> None:
    device = Ddr4Device(part_timing("8Gb x8"))
    assert (device.refresh_debt(8 * TREFI), device.refresh_debt(8 * TREFI + 1)) == (7, 8)
    device.advance(9 * TREFI)
    for i in range(9):
        device.issue(9 * TREFI + 280 * i, Command.REF)
    assert device.refresh_debt(9 * TREFI + 280 * 9) == 0
    device.advance(18 * TREFI)
    with pytest.raises(DramViolationError) as caught:
        device.issue(18 * TREFI + 1, Command.REF)
    found = caught.value
    assert (found.rule, found.minimum) == ("postponed REF", 8)
    assert found.previous is not None
    assert found.previous.clock == 9 * TREFI + 280 * 8
    assert str(found).endswith("9 owed, limit 8")


def test_a_missing_refresh_is_found_without_a_command() -> None:
    device = Ddr4Device(part_timing("8Gb x8"))
    with pytest.raises(DramViolationError, match=r"tREFI: NOP .*at 56161 after the start at 0"):
        device.advance(9 * TREFI + 1)


def test_one_refresh_after_eight_postponed_buys_one_interval() -> None:
    device = Ddr4Device(part_timing("8Gb x8"))
    device.issue(9 * TREFI, Command.REF)
    device.issue(10 * TREFI, Command.REF)
    with pytest.raises(DramViolationError, match=r"postponed REF: REF at 68641 .*, 9 owed"):
        device.issue(11 * TREFI + 1, Command.REF)


def test_eight_count_in_advance_and_the_ninth_is_lost() -> None:
    device = Ddr4Device(part_timing("8Gb x8"))
    for i in range(9):
        device.issue(1 + 280 * i, Command.REF)
    last = 1 + 280 * 8
    assert device.refresh_debt(last + 1) == -8
    # the two of them may still be no more than nine intervals apart
    device.advance(last + 9 * TREFI)
    with pytest.raises(DramViolationError, match="tREFI"):
        device.advance(last + 9 * TREFI + 1)


def test_sixteen_refreshes_in_two_intervals_and_no_more() -> None:
    steps = [S(1 + 280 * i, "REF") for i in range(16)]
    device = Ddr4Device(part_timing("8Gb x8"))
    play(device, *steps, S(1 + 2 * TREFI, "REF"))
    device = Ddr4Device(part_timing("8Gb x8"))
    play(device, *steps)
    with pytest.raises(DramViolationError, match="16 REF in 2 tREFI: REF at 12480 after REF at 1,"):
        play(device, S(2 * TREFI, "REF"))


def test_refresh_intervals_begin_where_one_says() -> None:
    for offset in (-100, 0, 4000):
        device = Ddr4Device(part_timing("8Gb x8"))
        device.refresh_offset(offset)
        first = TREFI - offset
        assert (device.refresh_debt(first), device.refresh_debt(first + 1)) == (0, 1)
        device.issue(8 * TREFI, Command.REF)
        device.advance(first + 9 * TREFI)
        with pytest.raises(DramViolationError, match="9 owed, limit 8"):
            device.advance(first + 9 * TREFI + 1)


def test_how_near_the_limits_a_rank_has_come() -> None:
    device = Ddr4Device(part_timing("8Gb x8"))
    for clock in (9 * TREFI, *(9 * TREFI + 300 * i for i in range(1, 15))):
        device.issue(clock, Command.REF)
    device.issue(11 * TREFI, Command.REF)
    assert device.refresh_extremes.shortest_seventeen == 2**63 - 1
    device.issue(11 * TREFI + 280, Command.REF)
    found = device.refresh_extremes
    assert (found.longest_gap, found.shortest_seventeen) == (9 * TREFI, 2 * TREFI + 280)
    assert (found.lowest_debt, found.highest_debt) == (-5, 8)


def test_the_clocks_of_the_bus_are_booked_to_their_causes() -> None:
    device = Ddr4Device(part_timing("8Gb x8"))
    play(device, *OPEN, S(130, "RD"))
    device.restart_bus_clocks(132)
    play(
        device,
        *(S(134, "RD", 1), S(139, "RD", 1), S(143, "RD"), S(160, "RD", 1)),
        *(S(170, "WR", 1), S(174, "WR"), S(199, "PREA"), S(210, "REF"), S(490, "ACT")),
        *(S(501, "WR"), S(505, "ACT", 1), S(516, "WR", 1)),
    )
    clocks = device.bus_clocks
    # gaps: 1 within a bank group, 13 that nobody asked for, 6 to turn, 323 around the refresh and
    # 11 for a row
    assert (clocks.bank_group, clocks.other, clocks.turnaround) == (1, 13, 6)
    assert (clocks.refresh, clocks.row) == (323, 11)
    assert (clocks.data, clocks.start) == (4 * 8, 2)
    assert clocks.total == 516 + 4 - 132
