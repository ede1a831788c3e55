"""Which AXI requests a channel refuses."""

import random

from amaranth import Module, Signal

from nearstep_hw.axi.signature import BurstType, Response
from nearstep_hw.dram.request import refusal
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry

from ..simulate import simulate

ADDRESS_BITS = 34


def expected(geometry, address, beats, size, burst):
    if address >= geometry.capacity_bytes:
        return Response.DECERR
    last = address // BEAT_BYTES * BEAT_BYTES + (beats - 1) * BEAT_BYTES
    if burst != BurstType.INCR or size != 6 or last // 4096 != address // 4096:
        return Response.SLVERR
    return Response.OKAY


def test_only_incrementing_bursts_of_full_beats_inside_a_page_of_the_channel_pass() -> None:
    seed = 13
    print(f"seed {seed}")
    rng = random.Random(seed)
    geometry = DramGeometry("8Gb", "x8")
    address, beats_less_one = Signal(ADDRESS_BITS), Signal(8)
    size, burst, found = Signal(3), Signal(BurstType), Signal(Response)
    m = Module()
    m.d.comb += found.eq(
        refusal(geometry, address=address, beats_less_one=beats_less_one, size=size, burst=burst)
    )
    seen = dict.fromkeys(Response, 0)

    async def bench(ctx):
        for _ in range(5000):
            base = rng.choice((0, geometry.capacity_bytes - 4096, geometry.capacity_bytes, 1 << 20))
            values = (
                base + rng.randrange(4096),
                rng.choice((1, 2, 63, 64, 65, 256, rng.randint(1, 256))),
                rng.choice((6, 6, 6, rng.randrange(8))),
                rng.choice((BurstType.INCR,) * 3 + tuple(BurstType)),
            )
            ctx.set(address, values[0])
            ctx.set(beats_less_one, values[1] - 1)
            ctx.set(size, values[2])
            ctx.set(burst, values[3])
            want = expected(geometry, *values)
            assert ctx.get(found) == want, values
            seen[want] += 1
            await ctx.delay(1e-9)

    simulate(m, bench)
    assert min(seen[kind] for kind in (Response.OKAY, Response.SLVERR, Response.DECERR)) > 300
