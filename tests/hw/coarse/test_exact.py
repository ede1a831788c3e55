"""The accumulator of exact sums against the golden model."""

import numpy as np
import pytest

from nearstep_hw.coarse.exact import ExactAccumulator
from nearstep_hw.coarse.sums import DIGITS, PACE
from nearstep_sim.bench.operands import SPECIALS
from nearstep_sim.bench.stream_bench import STALLS, StreamBench
from nearstep_sim.golden.coarse_cpp import exact_sum
from nearstep_sim.golden.fp import narrow32, widen32
from nearstep_spec.coarse.config import MAX_ADDENDS
from nearstep_spec.fp import BF16, FP16, FP32

pytestmark = pytest.mark.deep

FORMATS = {"fp16": FP16, "bf16": BF16, "fp32": FP32}


@pytest.fixture(scope="module", params=FORMATS)
def wire(request):
    return request.param


@pytest.fixture(scope="module")
def bench(wire):
    unit = StreamBench(
        ExactAccumulator(FORMATS[wire], pace=PACE, digits=DIGITS), name="exact", key=wire
    )
    yield unit
    unit.close()


def draws(rng, sums, wire):
    """Rows of float32 of the format: for each sum numbers near each other, tiny, huge, that cancel,
    or any; specials in some."""
    counts = np.minimum(rng.geometric(0.15, sums), 60)
    counts[:3] = (1, 2, MAX_ADDENDS)
    data = np.full((sums, MAX_ADDENDS), -0.0, np.float32)
    least = {"fp16": -24, "bf16": -133, "fp32": -149}[wire]
    most = {"fp16": 15, "bf16": 127, "fp32": 127}[wire]
    for row, count in zip(data, counts, strict=True):
        middle = rng.integers(least, most + 1)
        spread = rng.choice([0, 3, 40, 300])
        exponents = np.clip(middle + rng.integers(-spread, spread + 1, count), least, most)
        with np.errstate(all="ignore"):
            values = np.ldexp(rng.uniform(-2, 2, count), exponents).astype(np.float32)
        half = count // 2
        if rng.random() < 0.4:
            values[half : 2 * half] = -values[:half]
        if rng.random() < 0.3:
            some = rng.random(count) < 0.3
            values[some] = rng.choice(SPECIALS.view(np.float32), int(some.sum()))
        if rng.random() < 0.1:
            values = rng.choice(np.array([0.0, -0.0], np.float32), count)
        row[:count] = values
    if wire != "fp32":
        data = widen32(narrow32(data, FORMATS[wire]), FORMATS[wire])
    return data, counts


def patterns(values, wire):
    if wire == "fp32":
        return np.ascontiguousarray(values).view(np.uint32)
    return narrow32(values, FORMATS[wire]).astype(np.uint32)


@pytest.mark.parametrize("divisor", [1, 2, 3, 64, 1000, MAX_ADDENDS])
@pytest.mark.parametrize("mode", ["free", "both"])
def test_sums_have_the_bits_of_the_golden_model(bench, wire, mode, divisor) -> None:
    sums = 1500
    print("seed 81")
    data, counts = draws(np.random.default_rng(81), sums, wire)
    expected = np.empty(sums, np.float32)
    exact_sum([*np.ascontiguousarray(data.T)], [expected], wire=wire, divisor=divisor)
    given = np.concatenate([row[:count] for row, count in zip(data, counts, strict=True)])
    last = np.zeros(len(given), np.uint32)
    last[np.cumsum(counts) - 1] = 1
    words = patterns(given, wire)
    if wire == "fp32":
        rows = np.stack([words, last], axis=1)
    else:
        rows = (words | last << 16)[:, None]
    held = {"i_clear": 0, "i_divisor": divisor}
    run = bench.run({"i": rows}, held, space=sums, stalls=STALLS[mode], seed=7)
    found = run.streams["o"][:, 0]
    assert found.size == sums
    wrong = np.flatnonzero(found != patterns(expected, wire))
    assert not wrong.size, (wrong[0], data[wrong[0]][: counts[wrong[0]]], hex(found[wrong[0]]))


def test_a_sum_takes_a_cycle_for_each_addend_and_each_turn(bench, wire) -> None:
    unit = ExactAccumulator(FORMATS[wire], pace=PACE)
    assert (unit.words, unit.turns) == ((1, 1) if wire == "fp16" else (5, 2))
    checks = 0
    for addends in (1, 2, unit.turns + 1, 40):
        rows = np.zeros((50 * addends, 2 if wire == "fp32" else 1), np.uint32)
        rows[addends - 1 :: addends, -1] = 1 if wire == "fp32" else 1 << 16
        run = bench.run(
            {"i": rows}, {"i_clear": 0, "i_divisor": 1}, space=50, stalls=STALLS["free"], seed=1
        )
        period = max(addends, unit.turns + 1)
        assert run.last["o"] - run.first["o"] == 49 * period
        assert run.first["o"] - run.first["i"] == addends - 1 + unit.latency
        checks += 1
    assert checks == 4
