# amaranth: UnusedElaboratable=no
"""Rounding to bfloat16, to nearest even and stochastically, against the golden model."""

import numpy as np
import pytest
from amaranth import Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.updater.narrow import Narrow
from nearstep_hw.updater.random_bits import STREAM_WIDTH, RandomBits, calls_of
from nearstep_hw.updater.threefry import DEPTH
from nearstep_sim.bench.stream_bench import STALLS, StreamBench
from nearstep_sim.golden import fp
from nearstep_sim.golden.rounding import Draw, round_stochastically
from nearstep_spec.fp import BF16
from nearstep_spec.rounding import INDEX_BITS, SKIP_BITS, WORD_BITS
from nearstep_spec.updater.registers import CopyOutFormat

BEATS_WIDTH = 16
SHAPES = [
    pytest.param(shape, id=f"{shape[0]}-{shape[1]}", marks=[] if shape == (4, 1) else marks)
    for marks in [pytest.mark.deep]
    for shape in [(1, 1), (2, 1), (4, 1), (8, 1), (16, 1), (16, 2), (16, 4)]
]
"""Lanes and generators."""


class Rounder(wiring.Component):
    """What stands in front of the FIFO of a state."""

    def __init__(self, lanes: int, calls: int) -> None:
        self.lanes, self.calls = lanes, calls
        self.block_elements = 8 * lanes
        beat = stream.Signature(32 * lanes)
        super().__init__(
            {
                "i": In(beat),
                "o": Out(beat),
                "i_beats": In(BEATS_WIDTH),
                "i_stream": In(STREAM_WIDTH),
                "i_seed": In(WORD_BITS),
                "i_step": In(WORD_BITS),
                "i_index": In(INDEX_BITS),
                "i_within": In(SKIP_BITS),
                "i_skip": In(SKIP_BITS),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.narrow = narrow = Narrow(
            lanes=self.lanes, formats=("bf16",), beats_width=BEATS_WIDTH, stochastic=True
        )
        m.submodules.random = random = RandomBits(
            lanes=self.lanes, calls=self.calls, block_elements=self.block_elements
        )
        wiring.connect(m, wiring.flipped(self.i), narrow.i)
        wiring.connect(m, narrow.o, wiring.flipped(self.o))
        wiring.connect(m, random.o, narrow.i_random)
        for name in ("stream", "seed", "step", "index", "within", "skip"):
            m.d.comb += getattr(random, f"i_{name}").eq(getattr(self, f"i_{name}"))
        m.d.comb += [
            narrow.i_beats.eq(self.i_beats),
            narrow.i_format.eq(CopyOutFormat.BF16),
            narrow.i_stochastic.eq(self.i_stream != 0),
            narrow.i_clear.eq(self.i_clear),
            random.i_clear.eq(self.i_clear),
        ]
        return m


@pytest.fixture(scope="module", params=SHAPES)
def bench(request):
    lanes, calls = request.param
    unit = StreamBench(Rounder(lanes, calls), name="rounder", key=f"{lanes} lanes {calls} calls")
    yield unit
    unit.close()


def _words(count: int, seed: int) -> np.ndarray:
    """Patterns of every kind of number: all exponents, the edges of each, NaN and infinities."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 1 << 32, count, dtype=np.uint32)
    edges = [0x0000_0000, 0x8000_0000, 0x0000_0001, 0x8000_FFFF, 0x007F_FFFF, 0x0080_0000,
             0x7F7F_0000, 0x7F7F_FFFF, 0xFF7F_8000, 0x7F80_0000, 0xFF80_0000, 0x7F80_0001,
             0xFFFF_FFFF, 0x7FC0_0000, 0x3F80_0000, 0x3F80_8000, 0x3F80_0001]  # fmt: skip
    words[: len(edges)] = edges[:count]
    return words


def _run(bench, words, draw, **options):
    lanes = bench.component.lanes
    rows = words.reshape(-1, lanes)
    inputs = {
        "i_beats": len(rows),
        "i_stream": 0 if draw is None else draw.stream,
        "i_seed": 0 if draw is None else draw.seed,
        "i_step": 0 if draw is None else draw.step,
        "i_index": 0 if draw is None else draw.index,
        "i_within": 0 if draw is None else draw.within,
        "i_skip": 0 if draw is None else draw.skip,
    }
    bench.run({"i": rows[:0]}, {**inputs, "i_clear": 1}, space=0, quiet=3)
    run = bench.run({"i": rows}, {**inputs, "i_clear": 0}, space=len(rows), **options)
    return run, run.streams["o"].reshape(-1).view(np.uint16)[: words.size]


def _draws(block: int):
    yield Draw(seed=0, step=0, stream=1, block=block)
    yield Draw(seed=0xFFFF_FFFF, step=1, stream=15, index=1 << 34, block=block)
    yield Draw(seed=7, step=0xFFFF_FFFF, stream=3, index=64, within=16, block=block, skip=3 * block)
    # A carry out of the counter's first word.
    yield Draw(seed=1, step=2, stream=2, index=(1 << 34) - 32, block=block, skip=block)


@pytest.mark.parametrize("stalls", STALLS)
def test_each_element_is_rounded_with_its_own_bits(bench, stalls):
    lanes, block = bench.component.lanes, bench.component.block_elements
    checked = 0
    for number, draw in enumerate(_draws(block)):
        words = _words(lanes * 301, seed=number)  # an odd number of beats
        _, found = _run(bench, words, draw, stalls=STALLS[stalls], seed=number)
        np.testing.assert_array_equal(found, round_stochastically(words.view(np.float32), draw))
        checked += found.size
    assert checked == 4 * 301 * lanes


def test_without_a_stream_numbers_are_rounded_to_nearest_even(bench):
    words = _words(bench.component.lanes * 400, seed=9)
    run, found = _run(bench, words, None)
    np.testing.assert_array_equal(found, fp.narrow32(words.view(np.float32), BF16))
    assert run.last["i"] - run.first["i"] == 399  # a beat every cycle


def test_generators_keep_up_with_as_many_units_as_they_are_made_for(bench):
    lanes, calls = bench.component.lanes, bench.component.calls
    beats = 400
    run, _ = _run(bench, _words(lanes * beats, seed=5), Draw(seed=1, step=1, stream=1, block=1))
    cycles = max(1, lanes // (4 * calls))  # of a beat
    assert run.last["i"] - run.first["i"] == (beats - 1) * cycles
    assert run.first["i"] <= DEPTH + 3 + cycles
    for units in (1, 2, 4, 8, 16):
        assert 4 * calls_of(units) >= units


def test_the_same_again_after_a_clear(bench):
    words = _words(bench.component.lanes * 64, seed=6)
    draw = Draw(seed=5, step=6, stream=7, block=bench.component.block_elements)
    first, second = (_run(bench, words, draw)[1] for _ in range(2))
    np.testing.assert_array_equal(first, second)
    other = _run(bench, words, Draw(seed=5, step=7, stream=7, block=draw.block))[1]
    assert (first != other).any()
