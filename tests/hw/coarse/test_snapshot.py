"""The gate of snapshots: no page is copied for a snapshot that is being closed."""

import pytest

from nearstep_hw.coarse.snapshot import SnapshotGate
from nearstep_spec.coarse.config import PAGE_BYTES, CoarseConfig

from ..simulate import simulate

WRITTEN = 20  # the cycle in which a write to a frozen page is offered
LOOKED = WRITTEN + 1  # in which its page is looked up, and a copy begins


@pytest.mark.parametrize("close", range(WRITTEN - 3, LOOKED + 3))
def test_a_snapshot_that_is_told_to_close_begins_no_copy(close):
    config = CoarseConfig(memory_bytes=4 * PAGE_BYTES, snapshot_pages=2)
    dut = SnapshotGate(config, id_width=1)
    asked, passed = [], []

    async def bench(ctx):
        ctx.set(dut.i_area, 2 * PAGE_BYTES)
        ctx.set(dut.i_pages, 2)
        ctx.set(dut.m_axi.aw.ready, 1)
        for cycle in range(LOOKED + 10):
            ctx.set(dut.i_open, cycle == 2)
            ctx.set(dut.i_close, cycle == close)
            ctx.set(dut.s_axi.aw.valid, cycle >= WRITTEN and not passed)
            assert cycle != WRITTEN - 4 or ctx.get(dut.o_open)
            if ctx.get(dut.read.ar.valid):
                asked.append(cycle)
            if ctx.get(dut.m_axi.aw.valid):
                passed.append(cycle)
            await ctx.tick()
        assert ctx.get(dut.o_open) == bool(asked)

    simulate(dut, bench)
    if close < LOOKED:
        assert not asked
        assert WRITTEN <= passed[0] <= LOOKED + 1
    else:
        assert asked[0] == LOOKED + 1
        assert not passed
