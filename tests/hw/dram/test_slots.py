"""What every column slot of a short schedule was used for, and when the pins said what."""

from itertools import groupby

import pytest

from nearstep_hw.dram.column_stage import Slot
from nearstep_hw.dram.dfi import PHASES
from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.scheduler import CommandScheduler
from nearstep_spec.dram.command import Command, encode
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.timing import dram_timing

from ..simulate import simulate

TIMING = dram_timing(density="4Gb", width="x16")
COLUMN = 0x3FF  # bits of the address that are a column
KINDS = {encode(kind).address: kind for kind in Command if kind not in (Command.NOP, Command.ACT)}

MOVING = [
    ("ROW", 4),
    ("READ", 1),
    ("ROW", 1),
    ("READ", 1),
    ("BANK_GROUP", 1),
    ("READ", 1),
    ("TURNAROUND", 1),
    ("WRITE", 2),
    ("ROW", 10),  # another row of the bank
    ("READ", 2),
    ("SPACE", 61),
    ("ROW", 1),
    ("READ", 1),
]
SLOTS = {
    1: [
        ("REFRESH", 2),  # all is closed
        ("EMPTY", 4),
        *MOVING,
        ("EMPTY", 32),
        ("REFRESH", 56),  # early: nothing else was to be done
        ("EMPTY", 69),
        ("REFRESH", 4),  # handed back
    ],
    # Nothing is lost to a refresh while nobody asks for the rank.
    2: [("EMPTY", 6), *MOVING, ("EMPTY", 162)],
}
COMMANDS = [
    (33, "ACT"),
    (41, "ACT"),
    (44, "RD"),
    (52, "RD"),
    (60, "RD"),
    (68, "WR"),
    (72, "WR"),
    (94, "PRE"),
    (105, "ACT"),
    (116, "RD"),
    (120, "RD"),
    (372, "RD"),
    (506, "PREA"),
    (517, "REF"),
    (1006, "PREA"),
]


@pytest.mark.parametrize("ranks", SLOTS)
def test_every_slot_of_a_known_schedule_is_booked_for_its_reason(ranks: int) -> None:
    """Open rows, a bank group twice, writes, a row miss, no space, no beats, a refresh."""
    dut = CommandScheduler(
        FabricTiming(TIMING),
        DramGeometry("4Gb", "x16", ranks),
        id_width=1,
        lookahead=32,
        few_beats=2,
        postponed=8,
    )
    # write, bank (group in the high bits), row
    beats = [(0, 0, 5), (0, 4, 5), (0, 4, 5), (1, 0, 5), (1, 4, 5), (0, 0, 6), (0, 4, 5), (0, 0, 6)]
    slots: list[Slot] = []
    given: list[tuple[int, Command]] = []
    few: list[int] = []

    async def bench(ctx: object) -> None:
        ctx.set(dut.i_enable, 1)
        ctx.set(dut.i_debt, 1)
        sent = 0
        for cycle in range(1000):
            ctx.set(dut.i_space, sent < 7 or cycle > 90)
            ctx.set(dut.i_enable, cycle < 250)
            ctx.set(dut.i.valid, cycle > 5 and sent < len(beats))
            if sent < len(beats):
                write, bank, row = beats[sent]
                payload = {"write": write, "bank": bank, "row": row, "column": sent}
                ctx.set(dut.i.payload, payload | {"id": sent % 2, "last": 0, "opens": 0})
            slots.append(Slot(ctx.get(dut.o_slot)))
            few.append(ctx.get(dut.o_few))
            for phase in range(PHASES):
                pins = getattr(dut, f"p{phase}")
                if not ctx.get(pins.cs_n) & 1:
                    kind = KINDS.get(ctx.get(pins.address) & ~COLUMN)
                    given.append(
                        (PHASES * cycle + phase, kind if ctx.get(pins.act_n) else Command.ACT)
                    )
            sent += ctx.get(dut.i.ready)
            await ctx.tick()
            if cycle > 250 and ctx.get(dut.o_idle):
                break
        assert sent == len(beats)

    simulate(dut, bench)
    assert [(slot.name, len(list(same))) for slot, same in groupby(slots)] == SLOTS[ranks]
    if ranks == 1:
        assert [(clock, kind.name) for clock, kind in given] == COMMANDS
        assert [len(list(same)) for _, same in groupby(few)] == [9, 6, 239]  # few outside
