"""The model of the rings against devices that pass parts on step by step in torch, and float64."""

from fractions import Fraction

import numpy as np
import pytest
import torch

from nearstep_sim.bench.operands import SPECIALS
from nearstep_sim.golden import coarse_cpp
from nearstep_sim.golden.coarse import OPERATIONS, element_parts, maximum32, ring_all_reduce
from nearstep_spec.coarse.config import BEAT_ELEMENTS, CoarseConfig

CONFIG = CoarseConfig(entry_phits=4)
FORMATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
NAN = 0x7FC00000


def _stepwise(tensors, operation, wire, reverse):
    """Every device's result, by the steps of every chunk at every position."""
    members, length = len(tensors), len(tensors[0])
    size = CONFIG.entry_beats(wire) * BEAT_ELEMENTS
    position = {(members - d) % members if reverse else d: d for d in range(members)}
    out = [torch.zeros(length) for _ in tensors]
    for start in range(0, length, members * size):
        beats = min(-(-(length - start) // BEAT_ELEMENTS), members * size // BEAT_ELEMENTS)
        part = -(-beats // members) * BEAT_ELEMENTS
        moving = {}
        for k in range(2 * members - 1):
            sent = {}
            for r in range(members):
                begin = start + (r - k) % members * part
                place = slice(min(begin, length), min(begin + part, length))
                mine = tensors[position[r]][place]
                if k == 0:
                    sent[r] = mine.to(FORMATS[wire])
                    continue
                value = moving[(r - 1) % members].to(torch.float32)
                if k < members:
                    if operation == "max":
                        value = torch.maximum(value, mine)
                    else:
                        value = value + mine
                    if k == members - 1 and operation == "average":
                        value = value * torch.tensor(np.float32(1 / members))
                sent[r] = value.to(FORMATS[wire])
                if k >= members - 1:
                    out[position[r]][place] = sent[r].to(torch.float32)
            moving = sent
    return out


def _bits(x):
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).copy()
    bits[(bits & 0x7FFFFFFF) > 0x7F800000] = NAN
    return bits


@pytest.mark.parametrize("wire", FORMATS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_device_of_a_stepwise_ring_holds_what_the_model_says(operation, wire) -> None:
    rng = np.random.default_rng(11)
    checks = 0
    for members in (2, 3, 4, 7):
        chunk = members * CONFIG.entry_elements(wire)
        sizes = [0, 1, 15, 16, 17, chunk - 1, chunk, chunk + 1, 3 * chunk - 17, 4 * chunk + 33]
        for length in sizes:
            for reverse in (False, True):
                scale = np.exp2(rng.integers(-20, 16, (members, length)))
                data = (rng.standard_normal((members, length)) * scale).astype(np.float32)
                if operation == "max":
                    data[rng.random(data.shape) < 0.1] = np.nan
                golden = ring_all_reduce(
                    list(data), operation=operation, wire=wire, config=CONFIG, reverse=reverse
                )
                assert golden.dtype == np.float32
                assert golden.shape == (length,)
                oracle = _stepwise(list(map(torch.from_numpy, data)), operation, wire, reverse)
                for tensor in oracle:
                    assert np.array_equal(_bits(tensor.numpy()), golden.view(np.uint32))
                    checks += 1
    assert checks == (2 + 3 + 4 + 7) * 10 * 2


def test_sum_and_average_in_fp32_are_within_the_rounding_of_float64() -> None:
    rng = np.random.default_rng(12)
    data = rng.standard_normal((5, 3000)).astype(np.float32)
    exact, bound = data.astype(np.float64).sum(0), np.abs(data).sum(0) * 5 * 2.0**-24
    for operation, factor in (("sum", 1.0), ("average", 0.2)):
        got = ring_all_reduce(list(data), operation=operation, wire="fp32", config=CONFIG)
        assert np.all(np.abs(got - exact * factor) <= 2 * bound * factor)


def test_parts_of_a_whole_and_of_a_short_chunk() -> None:
    parts = element_parts(16 * 9 + 1, members=3, entry_beats=2)
    assert parts.reshape(-1)[::16].tolist() == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1]
    assert element_parts(0, members=3, entry_beats=2).shape == (0,)
    assert element_parts(16, members=3, entry_beats=2).tolist() == [0] * 16


def test_maximum_of_special_values_follows_the_standard() -> None:
    bits = SPECIALS
    a, b = (x.ravel() for x in np.meshgrid(bits, bits))
    got = maximum32(a.view(np.float32), b.view(np.float32)).view(np.uint32)
    for x, y, z in zip(a.tolist(), b.tolist(), got.tolist(), strict=True):
        assert z == _maximum(x, y), f"{x:#x} {y:#x}"
    assert len(got) >= 100


def _maximum(x: int, y: int) -> int:
    if any(v & 0x7FFFFFFF > 0x7F800000 for v in (x, y)):
        return NAN
    return max(x, y, key=lambda v: (_value(v), v == 0))


def _value(bits: int) -> Fraction:
    sign = -1 if bits >> 31 else 1
    field, fraction = (bits >> 23) & 0xFF, bits & 0x7FFFFF
    if field == 0:
        return sign * Fraction(fraction, 1 << 149)
    return sign * Fraction((1 << 23) + fraction) * Fraction(2) ** (field - 150)


@pytest.mark.parametrize(
    "change",
    [{"operation": "min"}, {"wire": "fp8"}, {"tensors": 1}, {"length": 1}],
)
def test_what_no_ring_has_is_refused(change) -> None:
    tensors = [np.zeros(8, np.float32)] * change.get("tensors", 2)
    if "length" in change:
        tensors = [*tensors, np.zeros(1, np.float32)]
    with pytest.raises(ValueError, match="not"):
        ring_all_reduce(
            tensors,
            operation=change.get("operation", "sum"),
            wire=change.get("wire", "fp32"),
            config=CONFIG,
        )


def _sum_natively(data, reverse, scale, copies, first, length):
    outs = [np.full(length + 1, -1, np.float32)[:length] for _ in range(copies)]
    coarse_cpp.ring_sum(
        list(data),
        outs,
        first=first,
        entry_elements=CONFIG.entry_elements("fp32"),
        reverse=reverse,
        scale=scale,
    )
    for each in outs:
        assert each.base[length] == -1, "behind the last element"
        assert np.array_equal(each.view(np.uint32), outs[0].view(np.uint32))
    return outs[0]


@pytest.mark.parametrize("operation", ["sum", "average"])
def test_native_sums_are_those_of_the_model_in_any_range(operation) -> None:
    rng = np.random.default_rng(13)
    checks = 0
    for members in (2, 3, 4, 7):
        chunk = members * CONFIG.entry_elements("fp32")
        for size in (0, 1, 17, chunk - 1, chunk, 3 * chunk - 17, 40 * chunk + 33):
            data = rng.integers(0, 1 << 32, (members, size), np.uint32)
            special = rng.random(data.shape) < 0.3
            data[special] = rng.choice(SPECIALS, int(special.sum()))
            data = data.view(np.float32)
            scale = np.float32(1 / members) if operation == "average" else None
            for reverse in (False, True):
                want = ring_all_reduce(
                    list(data), operation=operation, wire="fp32", config=CONFIG, reverse=reverse
                ).view(np.uint32)
                ranges = [(0, size), *np.sort(rng.integers(0, size + 1, (4, 2))).tolist()]
                for copies, (first, last) in enumerate(ranges, 1):
                    got = _sum_natively(data, reverse, scale, copies, first, last - first)
                    assert np.array_equal(got.view(np.uint32), want[first:last])
                    checks += 1
                place = data.copy()
                for first in range(0, size, 96):  # in place, range by range
                    end = min(size, first + 96)
                    out = [each[first:end] for each in place]
                    coarse_cpp.ring_sum(
                        list(place),
                        out,
                        first=first,
                        entry_elements=CONFIG.entry_elements("fp32"),
                        reverse=reverse,
                        scale=scale,
                    )
                for each in place:
                    assert np.array_equal(each.view(np.uint32), want)
                    checks += 1
    assert checks == 7 * 2 * (4 * 5 + 2 + 3 + 4 + 7)


def test_native_sums_keep_subnormals_whatever_the_caller_does_with_them() -> None:
    data = np.full((3, 17), 3, np.uint32).view(np.float32)
    try:
        assert torch.set_flush_denormal(True)
        got = _sum_natively(data, False, None, 1, 0, 17)
    finally:
        torch.set_flush_denormal(False)
    assert got.view(np.uint32).tolist() == [9] * 17


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"tensors": [np.zeros(8, np.float32)]}, "2 or more"),
        ({"outs": []}, "1 or more"),
        ({"entry_elements": 0}, "1 or more"),
        ({"tensors": [np.zeros(8), np.zeros(8)]}, "float64"),
        ({"outs": [np.zeros(16, np.float32)[::2]]}, "contiguous"),
        ({"outs": [np.zeros(9, np.float32)]}, "0 to 9"),
        ({"first": 1}, "1 to 9"),
        ({"outs": [np.frombuffer(bytes(32), np.float32)]}, "writable"),
        ({"halves": "fp32"}, "halves must be one of fp16, bf16"),
    ],
)
def test_arrays_that_the_native_sum_cannot_take_are_refused(change, names) -> None:
    given = {
        "tensors": [np.zeros(8, np.float32)] * 2,
        "outs": [np.zeros(8, np.float32)],
        "entry_elements": 64,
    } | change
    with pytest.raises(ValueError, match=names):
        coarse_cpp.ring_sum(given.pop("tensors"), given.pop("outs"), **given)
