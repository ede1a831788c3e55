# amaranth: UnusedElaboratable=no
"""The gradient scan against its golden model."""

import math

import numpy as np
import pytest

from nearstep_hw.updater.scan import PARTIALS, GradientScan
from nearstep_sim.bench.operands import operands
from nearstep_sim.bench.stream_bench import STALLS, StreamBench
from nearstep_sim.golden import scan as golden

NAN64 = 0x7FF8_0000_0000_0000


@pytest.fixture(scope="module", params=[4, pytest.param(16, marks=pytest.mark.deep)])
def bench(request):
    lanes = request.param
    unit = StreamBench(GradientScan(lanes=lanes), name="scan", key=f"{lanes}", start="i_start")
    yield unit
    unit.close()


def _check(bench, gradients, *, stalls=(0.0, 0.0), seed=0):
    """The run, and whether it found an infinity or NaN."""
    lanes = bench.component.lanes
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, 1 << 32, (-(-len(gradients) // lanes), lanes), dtype=np.uint32)
    rows.reshape(-1)[: len(gradients)] = gradients.view(np.uint32)
    run = bench.run(
        {"i": rows}, {"i_count": len(gradients)}, space=0, stalls=stalls, seed=seed, quiet=400
    )
    found, total = golden.scan(gradients, lanes=lanes)
    bits = NAN64 if math.isnan(total) else int(np.float64(total).view(np.uint64))
    assert run.outputs["o_done"] == 1
    assert run.outputs["o_found_inf"] == found
    assert run.outputs["o_sum"] == bits, (hex(run.outputs["o_sum"]), total)
    return run, found


def test_hardware_and_model_have_as_many_partial_sums() -> None:
    assert PARTIALS == golden.PARTIALS


@pytest.mark.parametrize("mode", STALLS)
def test_any_length_in_any_stall_mode(bench, mode: str) -> None:
    rng = np.random.default_rng(41)
    lanes = bench.component.lanes
    beats = (1, 7, 8, 9, 16)
    lengths = [0, 1, *(beat * lanes + odd for beat in beats for odd in (-1, 0, 1)), 5000]
    for k, count in enumerate(lengths):
        scale = 10.0 ** rng.uniform(-12, 12, count)
        gradients = (rng.standard_normal(count) * scale).astype(np.float32)
        _, found = _check(bench, gradients, stalls=STALLS[mode], seed=k)
        assert not found


def test_a_million_gradients_at_a_beat_a_cycle(bench) -> None:
    rng = np.random.default_rng(42)
    gradients = rng.standard_normal(1 << 20).astype(np.float32)
    run, _ = _check(bench, gradients)
    assert run.last["i"] - run.first["i"] + 1 == (1 << 20) // bench.component.lanes


def test_patterns_of_every_kind(bench) -> None:
    found = 0
    for seed in range(300):
        words = operands(("g",), 48, seed)["g"].view(np.uint32)
        if seed % 2:
            words = words & np.uint32(0xBFFF_FFFF)  # no infinity and no NaN
        found += _check(bench, words.view(np.float32), seed=seed)[1]
    print(f"300 scans, {found} found something")
    assert 50 < found < 250


def test_infinity_in_the_last_element_is_found_and_behind_it_is_not(bench) -> None:
    gradients = np.ones(33, np.float32)
    gradients[32] = np.inf
    assert _check(bench, gradients)[1]
    row = np.full((1, bench.component.lanes), 0x7F80_0000, np.uint32)
    row[0, 0] = 0
    run = bench.run({"i": row}, {"i_count": 1}, space=0)
    assert (run.outputs["o_found_inf"], run.outputs["o_sum"]) == (0, 0)


def test_all_gradients_infinite(bench) -> None:
    run, found = _check(bench, np.full(1000, -np.inf, np.float32))
    assert found
    assert run.outputs["o_sum"] == 0x7FF0_0000_0000_0000


def test_a_scan_given_up_leaves_nothing_behind(bench) -> None:
    rows = np.full((40, bench.component.lanes), 0x7F80_0000, np.uint32)
    run = bench.run({"i": rows}, {"i_count": 10_000}, space=0)
    assert run.outputs["o_done"] == 0
    _check(bench, np.ones(100, np.float32))


def test_results_come_after_the_latency_of_the_docstring(bench) -> None:
    rows = np.ones((1, bench.component.lanes), np.float32).view(np.uint32)
    latency = bench.component.latency
    # The loop ends `quiet` cycles after the last transfer, and the outputs are those of then.
    for quiet, done in ((latency - 1, 0), (latency, 1)):
        run = bench.run({"i": rows}, {"i_count": bench.component.lanes}, space=0, quiet=quiet)
        assert run.outputs["o_done"] == done
