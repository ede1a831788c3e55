# amaranth: UnusedElaboratable=no
"""Units: a reset in mid-run forgets what is in flight, and results come after the latency again."""

import pytest
from amaranth import Module, ResetInserter, Signal
from amaranth.lib.wiring import In

from nearstep_hw.fp.unit import OPERATIONS, FpUnit
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.smartssd.axpby import AxpbyUnit
from nearstep_spec.rule.sgd import SGD

from ..simulate import simulate

UNITS = {name: lambda each=each: FpUnit(each) for name, each in OPERATIONS.items()}
UNITS |= {"sgd": lambda: FunctionalUnit(SGD), "axpby": lambda: AxpbyUnit(lanes=1)}


@pytest.mark.parametrize("name", UNITS)
def test_a_reset_in_mid_run_forgets_what_is_in_flight(name: str) -> None:
    unit, reset = UNITS[name](), Signal()
    m = Module()
    m.submodules.unit = ResetInserter(reset)(unit)
    streams = name == "axpby"
    valid, out = (unit.i.valid, unit.o.valid) if streams else (unit.i_valid, unit.o_valid)
    seen = []

    async def bench(ctx):
        if streams:
            ctx.set(unit.o.ready, 1)
        elif "i_en" in unit.signature.members:
            ctx.set(unit.i_en, 1)
        for port, member in unit.signature.members.items():
            if port.startswith("s_") and member.flow is In:
                ctx.set(getattr(unit, port), 1)
        for resets in (unit.latency - 1, unit.latency + 3, None):
            ctx.set(valid, 1)
            seen.append([])
            for _ in range(unit.latency + 2 if resets is None else resets):
                await ctx.tick()
                seen[-1].append(ctx.get(out))
            ctx.set(valid, 0)
            ctx.set(reset, resets is not None)
            await ctx.tick()
            ctx.set(reset, 0)
            for _ in range(2 * unit.latency if resets is not None else 0):
                assert not ctx.get(out)
                await ctx.tick()

    simulate(m, bench)
    early, late, last = seen
    assert early == [0] * (unit.latency - 1)
    assert late == [0] * (unit.latency - 1) + [1] * 4
    assert last == [0] * (unit.latency - 1) + [1] * 3
