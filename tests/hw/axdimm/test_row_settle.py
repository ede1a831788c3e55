"""RowSettle: the wait after each command, in each phase, is the minimum and hardly more."""

import pytest

from nearstep_hw.axdimm.row_settle import RowSettle
from nearstep_hw.dram.dfi import PHASES
from nearstep_spec.dram.command import Command, Pins, encode
from nearstep_spec.dram.timing import dram_timing

from ..simulate import simulate

# Clocks to any command whatever, from JESD79-4 for 1600K 8Gb x8.
MINIMA = {
    Command.ACT: 28,  # tRAS; tRC is tRP longer, which a PRE in between takes
    Command.RD: 6 + 11,  # tRTP + tRP, should it close the row
    Command.WR: 9 + 4 + 12 + 11,  # CWL + BL/2 + tWR + tRP
    Command.PRE: 11,
    Command.PREA: 11,
    Command.REF: 280,
    Command.MRS: 24,
    Command.ZQCS: 128,
    Command.ZQCL: 512,
}


def waits(phase: int) -> dict[Command, int]:
    """Clocks from each command, in one phase, to the earliest clock of a command decided on by
    `o_settled`."""
    dut = RowSettle(dram_timing())
    found: dict[Command, int] = {}

    async def bench(ctx) -> None:
        def drive(pins: Pins) -> None:
            port = getattr(dut, f"p{phase}")
            for name, value in pins._asdict().items():
                ctx.set(getattr(port, name), value)

        for command in MINIMA:
            drive(encode(command, bank_group=1, row=3 if command is Command.MRS else 1 << 14))
            cycles = 0
            while not ctx.get(dut.o_settled):
                await ctx.tick()
                drive(Pins())
                cycles += 1
            found[command] = PHASES * (cycles + 1) - phase

    simulate(dut, bench)
    return found


@pytest.mark.parametrize("phase", range(PHASES))
def test_every_minimum_passes_before_it_is_settled(phase: int) -> None:
    found = waits(phase)
    print(found)
    assert found.keys() == MINIMA.keys()
    for command, minimum in MINIMA.items():
        assert minimum <= found[command] < minimum + 2 * PHASES, command
