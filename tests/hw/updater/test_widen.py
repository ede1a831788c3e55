# amaranth: UnusedElaboratable=no
"""Widening of 16-bit elements against the golden conversions."""

import numpy as np
import pytest

from nearstep_hw.updater.widen import Widen
from nearstep_sim.bench.stream_bench import STALLS, StreamBench
from nearstep_sim.golden import fp
from nearstep_spec.fp import BF16, FP16, FP32
from nearstep_spec.updater.registers import GradientFormat

SOURCES = {"fp16": FP16, "bf16": BF16}
LANES = (1, 4)


@pytest.fixture(scope="module", params=LANES)
def bench(request):
    lanes = request.param
    widen = Widen(lanes=lanes, formats=("fp32", "fp16", "bf16"))
    unit = StreamBench(widen, name="widen", key=f"{lanes} lanes")
    yield unit, lanes
    unit.close()


def _run(bench, rows, form, *, clear=0, **options):
    unit, lanes = bench
    given = rows.view(np.uint32).reshape(-1, lanes)
    inputs = {"i_format": GradientFormat[form.upper()], "i_clear": clear}
    run = unit.run({"i": given}, inputs, space=2 * len(given), **options)
    return run, run.streams["o"].reshape(-1)


@pytest.mark.parametrize("stalls", STALLS)
@pytest.mark.parametrize("form", SOURCES)
def test_every_pattern_becomes_the_binary32_of_its_value(bench, form, stalls):
    print("seed 3")
    halves = np.random.default_rng(3).permutation(1 << 16).astype(np.uint16)
    run, wide = _run(bench, halves, form, stalls=STALLS[stalls], seed=5)
    expected, _ = fp.convert(halves.astype(np.uint32), SOURCES[form], FP32)
    np.testing.assert_array_equal(wide, expected.astype(np.uint32))
    assert wide.size == 1 << 16
    assert run.transfers["o"] == 2 * run.transfers["i"]


@pytest.mark.parametrize("stalls", STALLS)
def test_binary32_passes_as_it_is(bench, stalls):
    print("seed 4")
    words = np.random.default_rng(4).integers(0, 1 << 32, 4096, dtype=np.uint32)
    words[:3] = 0x7F80_0001, 0xFFC0_1234, 0x8000_0001  # NaN with a payload, subnormal
    run, out = _run(bench, words, "fp32", stalls=STALLS[stalls], seed=6)
    np.testing.assert_array_equal(out, words)
    assert run.transfers["o"] == run.transfers["i"] == 4096 // bench[1]


@pytest.mark.parametrize("form", ["fp32", "fp16"])
def test_a_beat_comes_out_every_cycle(bench, form):
    run, _ = _run(bench, np.zeros(4096, np.uint32), form)
    beats = run.transfers["o"]
    assert run.last["o"] - run.first["o"] == beats - 1
    assert run.first["o"] - 1 == Widen.latency


def test_nothing_is_left_behind_by_a_clear(bench):
    _, lanes = bench
    ones = np.ones(2 * lanes, np.uint16)
    _, none = _run(bench, np.repeat(ones, 5), "fp16", clear=1)
    assert not none.size
    _, wide = _run(bench, ones, "fp16")
    assert wide.size == 2 * lanes
