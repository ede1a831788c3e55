"""The FIFO of whole packets against a list."""

import random

import pytest
from amaranth.lib import data
from amaranth.sim import SimulatorContext

from nearstep_hw.pcie.packet_fifo import PacketFifo

from ..simulate import giving, simulate, taking

LAYOUT = data.StructLayout({"value": 12, "last": 1, "discontinue": 1})
DEPTH = 8


@pytest.mark.parametrize("stall", [0.0, 0.6])
def test_only_whole_packets_come_out(stall):
    rng = random.Random(str(stall))
    beats, expected = [], []
    for _ in range(300):
        size, drop = rng.randrange(1, DEPTH + 1), rng.random() < 0.3
        values = [rng.randrange(1 << 12) for _ in range(size)]
        packet = [(value, index == size - 1) for index, value in enumerate(values)]
        # The mark counts with the last beat only.
        beats += [(*beat, drop if beat[1] else rng.random() < 0.5) for beat in packet]
        expected += [] if drop else packet
    dut, got = PacketFifo(LAYOUT, depth=DEPTH), []
    shown = [{"value": value, "last": last, "discontinue": drop} for value, last, drop in beats]
    simulate(
        dut,
        giving(dut.i, shown, lambda: rng.random() < stall and rng.randrange(1, 5)),
        taking(dut.o, got, len(expected), lambda: rng.random() >= stall),
    )
    assert [(beat.value, bool(beat.last)) for beat in got] == expected
    print(f"{len(got)} beats out of {len(beats)}")


def test_a_packet_shows_when_its_last_beat_was_taken():
    dut = PacketFifo(LAYOUT, depth=DEPTH)

    async def body(ctx: SimulatorContext) -> None:
        ctx.set(dut.i.valid, 1)
        await ctx.tick().repeat(4)
        ctx.set(dut.i.valid, 0)
        for _ in range(10):
            assert not ctx.get(dut.o.valid)
            await ctx.tick()
        ctx.set(dut.i.payload.last, 1)
        ctx.set(dut.i.valid, 1)
        await ctx.tick()
        ctx.set(dut.i.valid, 0)
        assert not ctx.get(dut.o.valid)
        await ctx.tick()
        assert ctx.get(dut.o.valid)

    simulate(dut, body)


@pytest.mark.parametrize("depth", [0, 6])
def test_a_depth_that_is_no_power_of_two_is_an_error(depth):
    with pytest.raises(ValueError, match=f"power of two, not {depth}"):
        PacketFifo(LAYOUT, depth=depth)
