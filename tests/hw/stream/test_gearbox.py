"""StreamPack and StreamSplit against lists of pieces, free-running and stalled on either side."""

import random

import pytest

from nearstep_hw.stream.gearbox import StreamPack, StreamSplit

from ..simulate import simulate

STALLS = {"free": (0.0, 0.0), "source": (0.6, 0.0), "sink": (0.0, 0.6), "both": (0.5, 0.5)}
DEEP = [pytest.param(each, marks=pytest.mark.deep) for each in ("source", "sink")]
WIDTH = 8
SHAPES = [(1, False), (2, False), (2, True), (4, False), (4, True)]


def run(dut, words, stalls, *, half=False, seed=1):
    """Give (data, last) words; what came out, and the cycles from the first to the last."""
    print(f"seed {seed}")
    rng = random.Random(seed)
    out, times = [], []

    async def bench(ctx):
        ctx.set(dut.i_half, half)
        left, offers, held = list(words), False, None
        for cycle in range(40 * len(words) + 100):
            offers = bool(left) and (offers or rng.random() >= stalls[0])
            ctx.set(dut.i.valid, offers)
            data, last = left[0] if offers else (rng.getrandbits(WIDTH), rng.getrandbits(1))
            ctx.set(dut.i.payload.data, data)
            ctx.set(dut.i.payload.last, last)
            ctx.set(dut.o.ready, rng.random() >= stalls[1])
            now = None
            if ctx.get(dut.o.valid):
                now = (ctx.get(dut.o.payload.data), ctx.get(dut.o.payload.last))
            assert held is None or now == held, "what was offered changed before it was taken"
            taken = ctx.get(dut.o.valid & dut.o.ready)
            held = None if taken else now
            if taken:
                out.append(now)
                times.append(cycle)
            if ctx.get(dut.i.valid & dut.i.ready):
                left.pop(0)
                offers = False
            await ctx.tick()

    simulate(dut, bench)
    return out, times[-1] - times[0] + 1


def _packed(pieces, factor):
    groups = [pieces[k : k + factor] for k in range(0, len(pieces), factor)]
    return [
        (sum(data << WIDTH * k for k, (data, _) in enumerate(group)), group[-1][1])
        for group in groups
    ]


def _pieces(count, seed):
    rng = random.Random(seed)
    return [(rng.getrandbits(WIDTH), rng.getrandbits(1)) for _ in range(count)]


@pytest.mark.parametrize("stalls", ["free", "both", *DEEP])
@pytest.mark.parametrize(("factor", "half"), SHAPES)
def test_pack_puts_the_first_piece_lowest(factor, stalls, half):
    pieces = _pieces(48, 1)
    size = factor // 2 if half else factor
    out, cycles = run(
        StreamPack(piece_width=WIDTH, factor=factor), pieces, STALLS[stalls], half=half
    )
    mask = (1 << WIDTH * size) - 1
    assert [(data & mask, last) for data, last in out] == _packed(pieces, size)
    if stalls == "free":
        assert cycles == 48 - size + 1


@pytest.mark.parametrize("stalls", ["free", "both", *DEEP])
@pytest.mark.parametrize(("factor", "half"), SHAPES)
def test_split_gives_the_lowest_piece_first_and_last_once(factor, stalls, half):
    pieces = _pieces(48, 2)
    size = factor // 2 if half else factor
    words = _packed(pieces, factor)
    out, cycles = run(
        StreamSplit(piece_width=WIDTH, factor=factor), words, STALLS[stalls], half=half
    )
    expected = [
        (data >> WIDTH * k & (1 << WIDTH) - 1, int(last and k == size - 1))
        for data, last in words
        for k in range(size)
    ]
    assert out == expected
    if stalls == "free":
        assert cycles == len(expected)


@pytest.mark.filterwarnings("ignore:.*created but never used")
@pytest.mark.parametrize("gear", [StreamPack, StreamSplit])
def test_a_factor_that_is_no_power_of_two_is_refused(gear):
    with pytest.raises(ValueError, match="not 3"):
        gear(piece_width=WIDTH, factor=3)
