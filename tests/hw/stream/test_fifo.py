"""StreamFifo against a queue, free-running and stalled on either side."""

import random

import pytest

from nearstep_hw.stream.fifo import StreamFifo

from ..simulate import simulate

STALLS = {"free": (0.0, 0.0), "source": (0.6, 0.0), "sink": (0.0, 0.6), "both": (0.5, 0.5)}
WIDTH = 16


def run(depth, stalls, cycles=600, clear_every=None, seed=1):
    """Cycles of random traffic; (items out, cycles with a transfer out, most held)."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    dut = StreamFifo(WIDTH, depth=depth)
    held, out, most = [], 0, 0

    async def bench(ctx):
        nonlocal out, most
        number = 0
        for cycle in range(cycles):
            put = rng.random() >= stalls[0]
            get = rng.random() >= stalls[1]
            clear = clear_every is not None and cycle % clear_every == clear_every - 1
            ctx.set(dut.i.valid, put and not clear)
            ctx.set(dut.i.payload, number)
            ctx.set(dut.o.ready, get and not clear)
            ctx.set(dut.i_clear, clear)
            if ctx.get(dut.o.valid):
                assert held, "something came out of an empty FIFO"
                assert ctx.get(dut.o.payload) == held[0]
            goes_in = ctx.get(dut.i.valid & dut.i.ready)
            if ctx.get(dut.o.valid & dut.o.ready):
                held.pop(0)
                out += 1
            if goes_in:
                held.append(number)
                number = (number + 1) % (1 << WIDTH)
            if clear:
                held.clear()
            most = max(most, len(held))
            await ctx.tick()
        return out

    simulate(dut, bench)
    return out, most


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize("depth", [1, 4, 16])
def test_gives_what_it_took_in_order(depth, stalls):
    out, most = run(depth, STALLS[stalls])
    assert out > 100
    assert most <= depth + 1


def test_moves_a_payload_every_cycle():
    out, _ = run(16, STALLS["free"], cycles=200)
    assert out >= 200 - 3


def test_holds_its_depth_and_one_more():
    _, most = run(8, (0.0, 1.0), cycles=30)
    assert most == 9


@pytest.mark.parametrize("stalls", STALLS)
def test_forgets_everything_when_cleared(stalls):
    out, _ = run(4, STALLS[stalls], clear_every=23)
    assert out > 50


@pytest.mark.filterwarnings("ignore:.*created but never used")
@pytest.mark.parametrize("depth", [0, 3, -4])
def test_a_depth_that_is_no_power_of_two_is_refused(depth):
    with pytest.raises(ValueError, match="power of two"):
        StreamFifo(8, depth=depth)
