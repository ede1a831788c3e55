"""BlockSchedule against a naive cut of arrays into blocks and bursts."""

import random

import pytest

from nearstep_hw.axi.schedule import BlockSchedule

from ..simulate import simulate

PAGE = 4096


def naive(bases, beats, beat_bytes, block_beats, burst_beats, use=-1):
    """Bursts as (stream, address, beats, block_last, run_last), of the streams in `use`."""
    bursts = []
    for block in range(0, beats, block_beats):
        end = min(beats, block + block_beats)
        for stream, base in enumerate(bases):
            if not use >> stream & 1:
                continue
            beat = block
            while beat < end:
                address = base + beat * beat_bytes
                room = burst_beats - address // beat_bytes % burst_beats
                length = min(end - beat, room)
                beat += length
                bursts.append((stream, address, length, beat == end, beat == beats))
    return bursts


def run(dut, bases, beats, ready, rng, cancel_at=None, use=None, half=None):
    """The bursts offered, and the cycles until idle."""
    got = []

    async def bench(ctx):
        ctx.set(dut.i_beats, beats)
        if half is not None:
            ctx.set(dut.i_narrow, half)
        for port, base in zip(dut.i_base, bases, strict=True):
            ctx.set(port, base)
        if use is not None:
            ctx.set(dut.i_use, use)
        assert ctx.get(dut.o_idle)
        ctx.set(dut.i_start, 1)
        await ctx.tick()
        ctx.set(dut.i_start, 0)
        shown = None
        for cycle in range(100000):
            if cycle == cancel_at:
                ctx.set(dut.i_clear, 1)
                await ctx.tick()
                ctx.set(dut.i_clear, 0)
                assert ctx.get(dut.o_idle)
                assert not ctx.get(dut.o.valid)
                return
            if ctx.get(dut.o_idle):
                return
            ctx.set(dut.o.ready, rng.random() < ready)
            if ctx.get(dut.o.valid):
                burst = ctx.get(dut.o.payload)
                now = (burst.stream, burst.address, burst.beats, burst.block_last, burst.run_last)
                now = (*now[:3], bool(now[3]), bool(now[4]))
                assert shown in (None, now), f"changed from {shown} to {now}"
                shown = now
                if ctx.get(dut.o.ready):
                    got.append(now)
                    shown = None
            await ctx.tick()
        raise AssertionError("never idle")

    simulate(dut, bench)
    return got


def schedule(
    streams=4,
    beat_bytes=64,
    block_beats=64,
    burst_beats=64,
    optional=False,
    narrow=(),
    quantized=(),
):
    return BlockSchedule(
        streams=streams,
        address_width=34,
        beat_bytes=beat_bytes,
        block_beats=block_beats,
        burst_beats=burst_beats,
        optional=optional,
        narrow=narrow,
        quantized=quantized,
    )


@pytest.mark.parametrize(
    ("beat_bytes", "block_beats", "burst_beats"),
    [(64, 256, 64), (64, 8, 8), (4, 512, 256), (32, 16, 8), (16, 512, 256)],
)
@pytest.mark.parametrize("ready", [1.0, 0.3])
def test_bursts_are_those_of_the_naive_cut(beat_bytes, block_beats, burst_beats, ready):
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    checked = 0
    for beats in (1, block_beats - 1, block_beats, block_beats + 1, 3 * block_beats + 2):
        bases = [rng.randrange(0, 1 << 33) // beat_bytes * beat_bytes for _ in range(4)]
        bases[0] = (1 << 34) - beats * beat_bytes  # up to the last byte
        dut = schedule(4, beat_bytes, block_beats, burst_beats)
        got = run(dut, bases, beats, ready, rng)
        assert got == naive(bases, beats, beat_bytes, block_beats, burst_beats)
        for _, address, length, _, _ in got:
            assert address % PAGE + length * beat_bytes <= PAGE
        checked += len(got)
    assert checked > 30


@pytest.mark.parametrize("use", range(1, 16))
def test_arrays_that_are_left_out_are_not_asked_for(use):
    seed = 50 + use
    print(f"seed {seed}")
    rng = random.Random(seed)
    checked = 0
    for beats in (1, 8, 9, 35):
        bases = [rng.randrange(0, 1 << 33) // 64 * 64 for _ in range(4)]
        dut = schedule(4, 64, 8, 8, optional=True)
        got = run(dut, bases, beats, 0.7, rng, use=use)
        assert got == naive(bases, beats, 64, 8, 8, use)
        checked += len(got)
    assert checked >= 9


@pytest.mark.parametrize("cancel_at", [0, 1, 2, 3, 17])
def test_clear_withdraws_and_the_next_run_is_whole(cancel_at):
    rng = random.Random(1)
    dut = schedule(2, 64, 8, 8)
    bases = [0x1000, 0x9040]
    run(dut, bases, 20, 0.5, rng, cancel_at)
    dut = schedule(2, 64, 8, 8)
    assert run(dut, bases, 20, 0.5, rng) == naive(bases, 20, 64, 8, 8)


@pytest.mark.filterwarnings("ignore:.*created but never used")
def test_a_burst_longer_than_a_page_is_refused():
    with pytest.raises(ValueError, match="at most 256 beats and 4096 bytes"):
        schedule(beat_bytes=64, burst_beats=128)
    with pytest.raises(ValueError, match="at most 256 beats"):
        schedule(beat_bytes=4, block_beats=512, burst_beats=512)


@pytest.mark.parametrize("ready", [1.0, 0.3])
@pytest.mark.parametrize("narrow", [(0,), (1,), (3, 1)])
def test_an_array_of_half_the_width_has_half_the_beats_of_each_block(narrow, ready):
    seed = 6
    print(f"seed {seed}")
    rng = random.Random(seed)
    block, burst, beat_bytes = 64, 16, 16
    checked = 0
    for beats in (1, 2, 3, block - 1, block, block + 1, block + 2, 3 * block + 33):
        bases = [rng.randrange(0, 1 << 33) // beat_bytes * beat_bytes for _ in range(4)]
        for half in range(1 << len(narrow)):
            dut = schedule(4, beat_bytes, block, burst, narrow=narrow)
            chosen = [stream for bit, stream in enumerate(narrow) if half >> bit & 1]
            got = run(dut, bases, beats, ready, rng, half=half)
            for stream, base in enumerate(bases):
                shorter = stream in chosen
                length, of_block = ((beats + 1) // 2, block // 2) if shorter else (beats, block)
                alone = naive([base], length, beat_bytes, of_block, burst)
                assert [b[1:] for b in got if b[0] == stream] == [b[1:] for b in alone]
            ends = [b[0] for b in got if b[3]]
            assert ends == [0, 1, 2, 3] * -(-beats // block)
            checked += len(got)
    assert checked > 300


@pytest.mark.parametrize("ready", [1.0, 0.3])
@pytest.mark.parametrize("quantized", [(0,), (3, 1)])
def test_an_array_in_8_bits_has_a_beat_of_scales_in_each_block(quantized, ready):
    seed = 7
    print(f"seed {seed}")
    rng = random.Random(seed)
    block, burst, beat_bytes = 64, 16, 16
    checked = 0
    for beats in (1, 4, 5, block - 1, block, block + 1, block + 5, 3 * block + 33):
        bases = [rng.randrange(0, 1 << 33) // beat_bytes * beat_bytes for _ in range(4)]
        dut = schedule(4, beat_bytes, block, burst, narrow=(2,), quantized=quantized)
        got = run(dut, bases, beats, ready, rng, half=0)
        for stream, base in enumerate(bases):
            alone = naive([base], beats, beat_bytes, block, burst)
            if stream in quantized:
                lengths = [min(beats - k, block) for k in range(0, beats, block)]
                starts = [base + k * (1 + block // 4) * beat_bytes for k in range(len(lengths))]
                blocks = [
                    naive([at], 1 + -(-length // 4), beat_bytes, block, burst)
                    for at, length in zip(starts, lengths, strict=True)
                ]
                last = len(blocks) - 1
                alone = [
                    (*each[:4], each[4] and k == last) for k, of in enumerate(blocks) for each in of
                ]
            assert [b[1:] for b in got if b[0] == stream] == [b[1:] for b in alone]
        ends = [b[0] for b in got if b[3]]
        assert ends == [0, 1, 2, 3] * -(-beats // block)
        for _, address, length, _, _ in got:
            assert address // (burst * beat_bytes) == (address + length * beat_bytes - 1) // (
                burst * beat_bytes
            )
        checked += len(got)
    assert checked > 100
