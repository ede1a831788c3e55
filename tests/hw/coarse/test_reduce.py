"""The ALUs of a sync core against the golden model of floating point."""

from types import SimpleNamespace

import numpy as np
import pytest

from nearstep_hw.coarse.reduce import Reduce
from nearstep_sim.bench.operands import operands
from nearstep_sim.bench.stream_bench import STALLS, StreamBench
from nearstep_sim.golden.coarse import maximum32
from nearstep_sim.golden.fp import add32, mul32, narrow32, widen32
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.coarse.registers import ReduceOp, Wire
from nearstep_spec.fp import BF16, FP16

WIRES = CoarseConfig().wire_formats
RECEIVE, LOCAL, FINAL, SEND, WRITE, LAST, END = (1 << k for k in range(7))
FORMATS = {"fp16": FP16, "bf16": BF16}
SCALE = np.float32(1 / 3)


@pytest.fixture(
    scope="module", params=[2, *(pytest.param(n, marks=pytest.mark.deep) for n in (4, 16))]
)
def alus(request):
    """How many lanes there are.

    A sync core has 4 or more; of 2 the build takes half as long, and each has one beside it.
    """
    return request.param


@pytest.fixture(scope="module")
def bench(alus):
    shape = SimpleNamespace(alus=alus, wire_formats=WIRES, exact=())
    unit = StreamBench(Reduce(shape), name="reduce", key=f"{shape!r}")
    yield unit
    unit.close()


def _run(bench, wire, operation, received, local, control, mode="free", scale=SCALE):
    """Rows of what was sent, with `last`, and of what was written."""
    alus = local.shape[1]
    rows = np.zeros((len(control), 2 * alus + 1), np.uint32)
    rows[:, : received.shape[1]] = received
    rows[:, alus : 2 * alus] = local
    rows[:, -1] = control
    inputs = {
        "i_operation": ReduceOp[operation.upper()],
        "i_wire": Wire[wire.upper()],
        "i_scale": int(scale.view(np.uint32)),
        "i_stop": 0,
        "i_clear": 0,
    }
    run = bench.run({"i": rows}, inputs, space=len(rows), stalls=STALLS[mode], seed=5)
    return run.streams["send"], run.streams["write"], run


def _words(a, alus) -> np.ndarray:
    return np.ascontiguousarray(a).view(np.uint32).reshape(-1, alus)


def _on_the_wire(values, wire, alus):
    """Patterns as words of a beat, and what they are worth in binary32."""
    if wire == "fp32":
        return _words(values, alus), _words(values, alus)
    short = narrow32(values, FORMATS[wire])
    packed = short.reshape(-1, alus).view(np.uint32)
    return packed, _words(widen32(short, FORMATS[wire]), alus)


@pytest.mark.parametrize("mode", STALLS)
@pytest.mark.parametrize("operation", ["sum", "average", "max"])
@pytest.mark.parametrize("wire", ["fp32", "fp16", "bf16"])
def test_beats_of_every_kind_in_any_order(bench, alus, wire, operation, mode) -> None:
    beats = 3000
    print("seed 71")
    rng = np.random.default_rng(71)
    received, local = operands(["received", "local"], beats * alus, 71).values()
    coming, received32 = _on_the_wire(received, wire, alus)
    received = received32.view(np.float32).reshape(-1)
    kind = rng.choice([LOCAL, RECEIVE, RECEIVE | LOCAL, RECEIVE | LOCAL | FINAL], beats)
    where = rng.choice([0, SEND, WRITE, SEND | WRITE], beats) | rng.choice([0, LAST], beats)

    both = maximum32(received, local) if operation == "max" else add32(received, local)
    final = mul32(both, np.full_like(both, SCALE)) if operation == "average" else both
    value = np.select(
        [np.repeat(kind == k, alus) for k in (LOCAL, RECEIVE, RECEIVE | LOCAL)],
        [local.view(np.uint32), received.view(np.uint32), both.view(np.uint32)],
        final.view(np.uint32),
    ).view(np.float32)
    sent, written = _on_the_wire(value, wire, alus)

    got_sent, got_written, run = _run(
        bench, wire, operation, coming, _words(local, alus), kind | where, mode
    )
    goes, stays = (where & SEND) != 0, (where & WRITE) != 0
    assert np.array_equal(got_sent[:, : sent.shape[1]], sent[goes])
    assert np.array_equal(got_sent[:, -1], (where[goes] & LAST) // LAST)
    assert np.array_equal(got_written, written[stays])
    assert min(len(got_sent), len(got_written)) > beats // 3
    if mode == "free":
        assert run.last["i"] - run.first["i"] + 1 == beats


@pytest.mark.parametrize("wire", FORMATS)
def test_all_patterns_of_16_bits_are_widened_exactly(bench, alus, wire) -> None:
    patterns = np.arange(1 << 16, dtype=np.uint16)
    coming = patterns.reshape(-1, alus).view(np.uint32)
    control = np.full(len(coming), RECEIVE | SEND | WRITE)
    sent, written, _ = _run(bench, wire, "sum", coming, np.zeros((len(coming), alus)), control)
    wide = widen32(patterns, FORMATS[wire])
    assert np.array_equal(written, _words(wide, alus))
    back = narrow32(wide, FORMATS[wire]).reshape(-1, alus).view(np.uint32)
    assert np.array_equal(sent[:, : alus // 2], back)


@pytest.mark.parametrize("wire", FORMATS)
def test_ties_and_their_neighbours_are_narrowed_to_even(bench, alus, wire) -> None:
    wide = widen32(np.arange(1 << 16, dtype=np.uint16), FORMATS[wire]).view(np.uint32)
    step = 1 << (FORMATS["bf16"].width if wire == "bf16" else 13)
    values = np.concatenate([wide + np.uint32(step // 2 + d) for d in (-1, 0, 1)])
    values = values.astype(np.uint32).view(np.float32)
    local = _words(values, alus)
    sent, _, _ = _run(
        bench, wire, "sum", np.zeros((len(local), 1)), local, np.full(len(local), LOCAL | SEND)
    )
    assert np.array_equal(sent[:, : alus // 2], _on_the_wire(values, wire, alus)[0])
    assert len(sent) == 3 * (1 << 16) // alus


def test_scales_of_any_kind(bench, alus) -> None:
    """The host writes the scale: a subnormal one, a product that becomes one, specials."""
    print("seed 72")
    beats = 500
    received, local = operands(["received", "local"], beats * alus, 72).values()
    control = np.full(beats, RECEIVE | LOCAL | FINAL | WRITE)
    scales = np.array([3, 0x00400001, 0x00812345, 0x7F7FFFFF, 0x80000000, 0x7F800000, 0x7FC00001])
    for scale in scales.astype(np.uint32).view(np.float32):
        words = _words(received, alus), _words(local, alus)
        _, written, _ = _run(bench, "fp32", "average", *words, control, scale=scale)
        both = add32(received, local)
        assert np.array_equal(written, _words(mul32(both, np.full_like(both, scale)), alus))
