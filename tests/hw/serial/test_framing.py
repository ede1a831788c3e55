"""Deframer, framer and request buffer against the codec in Python."""

import random
from collections.abc import Iterator

import pytest
from amaranth.sim import SimulatorContext

from nearstep_hw.serial.deframer import Deframer
from nearstep_hw.serial.framer import Framer
from nearstep_hw.serial.request_buffer import RequestBuffer
from nearstep_spec.serial import framing
from nearstep_spec.serial.framing import to_frame
from nearstep_spec.serial.protocol import MOST_REQUEST

from ..simulate import simulate

LEAST, MOST = 3, 12


def line_of(rng: random.Random, frames: int) -> Iterator[int]:
    """Frames of all lengths, with bytes that are escaped, damaged at times, and noise between."""
    yield from rng.randbytes(5)
    for _ in range(frames):
        body = bytes(
            rng.choice((0x7D, 0x7E, rng.randrange(256))) for _ in range(rng.randint(0, MOST + 3))
        )
        frame = bytearray(to_frame(body))
        chance = rng.random()
        if chance < 0.1:
            frame[rng.randrange(len(frame))] ^= 1 << rng.randrange(8)
        elif chance < 0.2:
            del frame[rng.randrange(len(frame)) :]
        elif chance < 0.3:
            frame.insert(rng.randrange(len(frame)), rng.choice((0x7D, 0x7E, 0)))
        elif chance < 0.5:
            frame = frame[:-1]  # one flag ends a frame and begins the next
        yield from frame


@pytest.mark.parametrize("offer", [1.0, 0.3])
def test_frames_are_those_of_the_codec(offer: float) -> None:
    seed = 7
    print("seed", seed)
    rng = random.Random(seed)
    data = bytes(line_of(rng, 250))
    golden = framing.Deframer(MOST)
    wanted = list(golden.feed(data))
    short = [body for body in wanted if len(body) < LEAST]
    dut = Deframer(least_bytes=LEAST, most_bytes=MOST)
    found, held, dropped = [], bytearray(), 0

    async def bench(ctx: SimulatorContext) -> None:
        nonlocal dropped
        left = list(data)
        idle = 0
        while idle < 5:
            go = bool(left) and rng.random() < offer
            idle = 0 if left else idle + 1
            ctx.set(dut.i.valid, go)
            if go:
                ctx.set(dut.i.payload, left.pop(0))
            await ctx.tick()
            if ctx.get(dut.o.valid):
                held.append(ctx.get(dut.o.payload))
            end, drop = ctx.get(dut.o_end), ctx.get(dut.o_drop)
            assert end + drop + ctx.get(dut.o.valid) <= 1
            if end:
                found.append(bytes(held[: -framing.CRC_BYTES]))
            if end or drop:
                held.clear()
            dropped += drop

    simulate(dut, bench)
    assert found == [body for body in wanted if len(body) >= LEAST]
    assert dropped == golden.dropped + len(short)
    assert len(found) > 80
    assert min(len(short) - 5, golden.dropped - 60) > 0


def test_a_lost_byte_damages_its_frame_and_no_other() -> None:
    dut = Deframer(least_bytes=LEAST, most_bytes=MOST)
    ends = []

    async def bench(ctx: SimulatorContext) -> None:
        for number in range(4):
            for place, byte in enumerate(to_frame(b"abcdef")[:-1]):
                ctx.set(dut.i_damage, number == 1 and place == 4)
                ctx.set(dut.i.valid, 1)
                ctx.set(dut.i.payload, byte)
                await ctx.tick()
                ends.extend("ed"[k] for k in (0, 1) if ctx.get((dut.o_end, dut.o_drop)[k]))
        for byte in (framing.FLAG, 0, 0):
            ctx.set(dut.i.payload, byte)
            await ctx.tick()
            ends.extend("ed"[k] for k in (0, 1) if ctx.get((dut.o_end, dut.o_drop)[k]))

    simulate(dut, bench)
    assert "".join(ends) == "edee"


@pytest.mark.parametrize(("offer", "take"), [(1.0, 1.0), (0.4, 1.0), (1.0, 0.4), (0.5, 0.5)])
def test_the_framer_writes_frames_of_the_codec(offer: float, take: float) -> None:
    rng = random.Random(9)
    bodies = [
        bytes(rng.choice((0x7D, 0x7E, rng.randrange(256))) for _ in range(rng.randint(1, 20)))
        for _ in range(25)
    ]
    wanted = b"".join(map(to_frame, bodies))
    dut = Framer()
    out = bytearray()

    async def bench(ctx: SimulatorContext) -> None:
        left = [(byte, k == len(body) - 1) for body in bodies for k, byte in enumerate(body)]
        offered, before = False, None
        while len(out) < len(wanted):
            offered = offered or (bool(left) and rng.random() < offer)
            ctx.set(dut.i.valid, offered)
            if offered:
                ctx.set(dut.i.payload, {"data": left[0][0], "last": left[0][1]})
            ctx.set(dut.o.ready, rng.random() < take)
            shown = ctx.get(dut.o.payload) if ctx.get(dut.o.valid) else None
            assert before in (None, shown), "a byte holds until it is taken"
            fires = shown is not None and ctx.get(dut.o.ready)
            before = None if fires else shown
            if fires:
                out.append(shown)
            if offered and ctx.get(dut.i.ready):
                left.pop(0)
                offered = False
            await ctx.tick()
        assert not left

    simulate(dut, bench)
    assert out == wanted


def test_the_buffer_gives_whole_bodies_and_forgets_what_finds_no_room() -> None:
    seed = 4
    print("seed", seed)
    rng = random.Random(seed)
    dut = RequestBuffer(window=1)
    inside: list[bytes] = []  # bodies that wait, the first of them perhaps begun
    taken = {"bodies": 0, "dropped": 0, "full": 0}
    slots = 1 + 1  # lengths: one in memory, one at the output

    async def bench(ctx: SimulatorContext) -> None:
        taking: list[int] | None = None
        out = bytearray()

        async def edge(**inputs: int) -> None:
            nonlocal taking
            ctx.set(dut.i.valid, inputs.get("byte") is not None)
            ctx.set(dut.i.payload, inputs.get("byte") or 0)
            ctx.set(dut.i_end, inputs.get("end", 0))
            ctx.set(dut.i_drop, inputs.get("drop", 0))
            slow = len(inside) < 2 and rng.random() < 0.98
            ctx.set(dut.o_length.ready, taking is None and not slow)
            ctx.set(dut.o.ready, taking is not None)
            if ctx.get(dut.o_length.valid) and ctx.get(dut.o_length.ready):
                assert ctx.get(dut.o_length.payload) == len(inside[0])
                taking = list(inside[0])
            elif taking is not None and ctx.get(dut.o.valid):
                out.append(ctx.get(dut.o.payload))
                assert out[-1] == taking.pop(0)
                if not taking:
                    inside.pop(0)
                    taking = None
                    taken["bodies"] += 1
            await ctx.tick()

        for _ in range(60):
            body = rng.randbytes(rng.choice((1, 10, 40)))
            for byte in body + b"CRC!":
                await edge(byte=byte)
            drop = rng.random() < 0.2
            before = taken["dropped"]
            keeps = not drop and len(inside) - (taking is not None) < slots
            if keeps:
                inside.append(body)
            await edge(end=not drop, drop=drop)
            if ctx.get(dut.o_dropped):
                taken["dropped"] += 1
            assert (taken["dropped"] > before) == (not keeps)
            taken["full"] += not keeps and not drop
        while inside:
            await edge()

    simulate(dut, bench)
    print(taken)
    assert min(taken.values()) > 5
    assert taken["bodies"] > 20


def test_a_frame_that_finds_no_room_is_forgotten_whole() -> None:
    rng = random.Random(8)
    bodies = [rng.randbytes(size) for size in (MOST_REQUEST, MOST_REQUEST, 10)]
    dut = RequestBuffer(window=1)
    dropped, out = [], bytearray()

    async def bench(ctx: SimulatorContext) -> None:
        for body in bodies:
            for byte in body + b"CRC!":
                ctx.set(dut.i.valid, 1)
                ctx.set(dut.i.payload, byte)
                await ctx.tick()
            ctx.set(dut.i.valid, 0)
            ctx.set(dut.i_end, 1)
            await ctx.tick()
            ctx.set(dut.i_end, 0)
            dropped.append(ctx.get(dut.o_dropped))
        for body in (bodies[0], bodies[2]):
            ctx.set(dut.o_length.ready, 1)
            while not ctx.get(dut.o_length.valid):
                await ctx.tick()
            assert ctx.get(dut.o_length.payload) == len(body)
            await ctx.tick()
            ctx.set(dut.o_length.ready, 0)
            ctx.set(dut.o.ready, 1)
            end = len(out) + len(body)
            while len(out) < end:
                if ctx.get(dut.o.valid):
                    out.append(ctx.get(dut.o.payload))
                await ctx.tick()
            ctx.set(dut.o.ready, 0)

    simulate(dut, bench)
    assert dropped == [0, 1, 0]
    assert out == bodies[0] + bodies[2]


@pytest.mark.parametrize(("window", "depth"), [(1, 2048), (3, 4096), (7, 8192), (8, 16384)])
def test_the_buffer_holds_the_window(window: int, depth: int) -> None:
    assert RequestBuffer(window=window).depth == depth


def test_a_window_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="Window must be at least 1, not 0"):
        RequestBuffer(window=0)
