"""Windows in address bits, WindowMatch and WindowChecker against a comparison byte by byte."""

import random

import pytest
from amaranth import Module, Signal
from amaranth.sim import Simulator

from nearstep_hw.axi.burst import BurstLayout
from nearstep_hw.axi.window import WindowChecker, WindowMatch, within

from ..simulate import simulate

WINDOWS = 3
ADDRESS_WIDTH = 34
TOP = 1 << ADDRESS_WIDTH


REGISTER_WIDTH = 64


@pytest.mark.parametrize("address_width", [16, 34, 63, 64])
def test_a_window_of_any_bits_grants_what_it_does_of_the_address_space(address_width):
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    top = 1 << address_width
    edges = (0, 1, top // 2, top, top + top // 2, 2 * top, 1 << (REGISTER_WIDTH - 1))
    values = [edge + near for edge in edges for near in (-1, 0, 1)]
    values += [rng.getrandbits(rng.randrange(1, REGISTER_WIDTH + 1)) for _ in range(40)]
    values = sorted({value for value in values if 0 <= value < 1 << REGISTER_WIDTH})
    base, limit = Signal(REGISTER_WIDTH), Signal(REGISTER_WIDTH)
    o_base, o_limit, o_valid = within(address_width, base=base, limit=limit)
    assert (len(o_base), len(o_limit), len(o_valid)) == (address_width, address_width + 1, 1)
    seen = {"window": 0, "clamped": 0, "beyond": 0}

    async def bench(ctx):
        for one in values:
            for other in values:
                ctx.set(base, one)
                ctx.set(limit, other)
                assert ctx.get(o_valid) == (one < top), (one, other)
                if one < top:
                    found = ctx.get(o_base), ctx.get(o_limit)
                    assert found == (one, min(other, top)), (one, other)
                    seen["clamped" if other > top else "window"] += 1
                else:
                    seen["beyond"] += 1

    simulate(Module(), bench)
    print(seen)
    assert sum(seen.values()) == len(values) ** 2 > 900
    if address_width < REGISTER_WIDTH:
        assert min(seen.values()) > 20, seen


def granted(windows, start, end, read, write):
    return any(
        w["valid"]
        and (w["read"] or not read)
        and (w["write"] or not write)
        and w["base"] <= start
        and end <= w["limit"]
        for w in windows
    )


def set_windows(ctx, port, windows):
    for interface, window in zip(port, windows, strict=True):
        for name, value in window.items():
            ctx.set(getattr(interface, name), value)


def show(simulator, dut, windows):
    """Show the windows as `dut` wants them."""

    async def in_turn(ctx):
        index = 0
        while True:
            set_windows(ctx, dut.window, [windows[index]])
            await ctx.tick()
            index = (index + 1) % len(windows)

    async def side_by_side(ctx):
        set_windows(ctx, dut.window, windows)

    simulator.add_testbench(in_turn if dut.cut else side_by_side, background=True)


def random_windows(rng, near):
    def window():
        base = max(0, near + rng.randrange(-3, 4))
        return {
            "base": min(base, TOP - 1),
            "limit": min(TOP, max(0, base + rng.randrange(-2, 12))),
            "read": rng.random() < 0.7,
            "write": rng.random() < 0.7,
            "valid": rng.random() < 0.8,
        }

    return [window() for _ in range(WINDOWS)]


def test_matches_exactly_the_ranges_of_one_window():
    seed = 3
    print(f"seed {seed}")
    rng = random.Random(seed)
    dut = WindowMatch(address_width=ADDRESS_WIDTH, windows=WINDOWS)
    seen = [0, 0]

    async def bench(ctx):
        for _ in range(3000):
            near = rng.choice((0, 1000, 1 << 32, TOP - 8))
            windows = random_windows(rng, near)
            start = min(TOP - 1, max(0, near + rng.randrange(-3, 4)))
            end = start + rng.randrange(1, 8)
            read, write = rng.random() < 0.7, rng.random() < 0.5
            set_windows(ctx, dut.window, windows)
            ctx.set(dut.i_start, start)
            ctx.set(dut.i_end, end)
            ctx.set(dut.i_read, read)
            ctx.set(dut.i_write, write)
            await ctx.delay(0)
            wanted = granted(windows, start, end, read, write)
            assert ctx.get(dut.o_granted) == wanted, (windows, start, end, read, write)
            seen[wanted] += 1

    simulate(dut, bench)
    assert min(seen) > 200, seen


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize("write", [False, True])
def test_bursts_pass_until_the_first_that_is_refused(write, cut):
    seed = 7
    print(f"seed {seed}")
    rng = random.Random(seed)
    beat = 64
    layout = BurstLayout(streams=4, address_width=ADDRESS_WIDTH, burst_beats=64)
    dut = WindowChecker(layout, beat_bytes=beat, windows=WINDOWS, write=write, cut=cut)
    window = {"base": 4096, "limit": 8 * 4096 - 1, "read": not write, "write": write, "valid": 1}
    other = {**window, "base": 0, "limit": TOP, "read": write, "write": not write}
    closed = {**window, "base": 0, "limit": TOP, "valid": 0}
    windows = [other, window, closed]
    passed = refused = 0

    async def bench(ctx):
        nonlocal passed, refused
        for _ in range(300):
            beats = rng.randrange(1, 65)
            address = rng.randrange(0, 9 * 4096) // beat * beat
            burst = {"stream": 2, "address": address, "beats": beats}
            burst |= {"block_last": 1, "run_last": 0}
            ctx.set(dut.i.payload, burst)
            ctx.set(dut.i.valid, 1)
            assert ctx.get(dut.i.ready)
            await ctx.tick()
            ctx.set(dut.i.valid, 0)
            for _ in range(2 + WINDOWS if cut else 1):
                assert not ctx.get(dut.o.valid)
                assert not ctx.get(dut.o_refused)
                await ctx.tick()
            wanted = granted(windows, address, address + beats * beat, not write, write)
            assert ctx.get(dut.o.valid) == wanted
            assert ctx.get(dut.o_refused) == (not wanted)
            assert ctx.get(dut.o_burst).address == address
            if wanted:
                passed += 1
                assert ctx.get(dut.o.payload).address == address
                ctx.set(dut.o.ready, 1)
                await ctx.tick()
                ctx.set(dut.o.ready, 0)
            else:
                refused += 1
                for _ in range(rng.randrange(4)):  # nothing passes until it is cleared
                    ctx.set(dut.i.valid, 1)
                    assert not ctx.get(dut.i.ready)
                    assert not ctx.get(dut.o.valid)
                    await ctx.tick()
                ctx.set(dut.i.valid, 0)
                ctx.set(dut.i_clear, 1)
                await ctx.tick()
                ctx.set(dut.i_clear, 0)

    simulator = Simulator(dut)
    simulator.add_clock(1e-6)
    show(simulator, dut, windows)
    simulator.add_testbench(bench)
    simulator.run()
    assert passed > 50, passed
    assert refused > 30, refused
