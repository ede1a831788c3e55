"""The packer against a list of dwords."""

import random

import pytest
from amaranth.sim import Simulator, SimulatorContext

from nearstep_hw.pcie.dword_packer import DwordPacker

WIDTH = 9


def packed(lane: int, dwords: list[int], lanes: int) -> list[list[int]]:
    """Beats that a packet fills from a lane on."""
    flat = [0] * lane + dwords
    flat += [0] * (-len(flat) % lanes)
    return [flat[at : at + lanes] for at in range(0, len(flat), lanes)]


@pytest.mark.parametrize(
    ("elements", "lanes"),
    [
        *((2, 16), (4, 4)),
        *(
            pytest.param(*each, marks=pytest.mark.deep)
            for each in ((2, 2), (4, 16), (8, 8), (16, 16))
        ),
    ],
)
@pytest.mark.parametrize("stall", [0.0, 0.5])
def test_runs_are_packed_side_by_side(elements, lanes, stall):
    rng = random.Random(f"{elements} {lanes} {stall}")
    runs, expected = [], []
    for _ in range(60):
        lane, dwords, discontinue = rng.randrange(lanes), [], rng.randrange(2)
        for index in range(count := rng.randrange(1, 7)):
            run = [rng.randrange(1, 1 << WIDTH) for _ in range(rng.randrange(1, elements + 1))]
            last = index == count - 1
            start = rng.randrange(lanes) if index else lane  # counts in the first run only
            runs.append((run, start, last, discontinue if last else rng.randrange(2)))
            dwords += run
        beats = packed(lane, dwords, lanes)
        for beat in beats:
            last = beat is beats[-1]
            expected.append((beat, last, last and bool(discontinue)))

    dut = DwordPacker(elements=elements, lanes=lanes, element_width=WIDTH)
    got = []

    async def feed(ctx: SimulatorContext) -> None:
        for run, lane, last, discontinue in runs:
            while rng.random() < stall:
                await ctx.tick()
            junk = [rng.randrange(1 << WIDTH) for _ in range(elements - len(run))]
            for index, value in enumerate(run + junk):
                ctx.set(dut.i.payload.elements[index], value)
            ctx.set(dut.i.payload.count, len(run))
            ctx.set(dut.i.payload.lane, lane)
            ctx.set(dut.i.payload.last, last)
            ctx.set(dut.i.payload.discontinue, discontinue)
            ctx.set(dut.i.valid, 1)
            await ctx.tick().until(dut.i.ready)
            ctx.set(dut.i.valid, 0)

    async def take(ctx: SimulatorContext) -> None:
        while len(got) < len(expected):
            ctx.set(dut.o.ready, rng.random() >= stall)
            ready = ctx.get(dut.o.ready)
            _, _, valid, beat = await ctx.tick().sample(dut.o.valid, dut.o.payload)
            if valid and ready:
                values = [int(beat.elements[lane]) for lane in range(lanes)]
                got.append((values, bool(beat.last), bool(beat.discontinue)))

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    simulator.add_testbench(feed)
    simulator.add_testbench(take)
    simulator.run()
    assert got == expected
    print(f"{len(got)} beats of {len(runs)} runs")


@pytest.mark.parametrize(("elements", "lanes"), [(4, 2), (4, 12)])
def test_lanes_that_do_not_fit_are_errors(elements, lanes):
    with pytest.raises(ValueError, match=f"power of two and at least {elements}, not {lanes}"):
        DwordPacker(elements=elements, lanes=lanes, element_width=WIDTH)
