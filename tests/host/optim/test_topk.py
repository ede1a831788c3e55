"""Which elements are kept, against sorting; and what becomes of the others."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from nearstep.torch import convert
from nearstep.torch.compression import Compression
from nearstep.torch.errors import HyperparameterError
from nearstep.torch.topk import BLOCK, kept_of, kept_of_block, take_largest
from nearstep_sim.golden.topk_cpp import taker

SEED = 41
SIZES = [1, 2, 3, 15, 100, 101, BLOCK - 1, BLOCK, 3 * BLOCK + 777]
SHARES = [1e-9, 0.01, 0.05, 0.5, 0.999, 1.0]


def by_sorting(array, share):
    """Positions by a stable sort of each block, NaN before infinity before numbers."""
    kept = []
    for start in range(0, len(array), BLOCK):
        block = array[start : start + BLOCK]
        keys = block.view(np.uint32).astype(np.int64) & 0x7FFFFFFF
        order = np.argsort(-keys, kind="stable")
        kept += sorted(start + order[: kept_of_block(len(block), share)])
    return kept


def positions(array, share, take=take_largest):
    """Positions in the whole array."""
    index, value = take(array, None, None, share)
    assert value.tobytes() == array[index].tobytes()
    return index


def contents(kind, size):
    rng = np.random.default_rng(SEED)
    array = rng.standard_normal(size).astype(np.float32)
    if kind == "ties":
        array = np.round(array).astype(np.float32)
    elif kind == "zeros":
        array[rng.random(size) < 0.99] = 0.0
        array[rng.random(size) < 0.5] *= -1.0
    elif kind == "periodic":  # a sample of every 64th sees the small ones alone
        array[np.arange(size) % 64 == 0] *= 1e-3
    elif kind == "equal":
        array[:] = -2.0
    elif kind == "special":
        array[rng.random(size) < 0.02] = np.nan
        array[rng.random(size) < 0.02] = -np.inf
        array[rng.random(size) < 0.02] = np.float32(1e-45)
    return array


@pytest.fixture(params=["numpy", "native"])
def take(request):
    """The host's code, and what golden devices offer in its place."""
    return take_largest if request.param == "numpy" else taker()


@pytest.mark.parametrize("kind", ["normal", "ties", "zeros", "equal", "special", "periodic"])
def test_kept_elements_are_those_that_a_stable_sort_puts_first(kind, take):
    compared = 0
    for size in SIZES:
        array = contents(kind, size)
        before = array.tobytes()
        for share in SHARES:
            kept = positions(array, share, take)
            assert kept.tolist() == by_sorting(array, share)
            assert len(kept) == kept_of(size, share)
            compared += len(kept)
        assert array.tobytes() == before
    print(f"seed {SEED}: {compared} positions compared")
    assert compared == sum(kept_of(size, share) for size in SIZES for share in SHARES)


def test_every_pattern_has_its_place(take):
    """Bits of all kinds, of which few differ, or many."""
    rng = np.random.default_rng(SEED)
    for turn in range(200):
        size = int(rng.integers(1, 4000))
        bits = rng.integers(0, 1 << 32, size, dtype=np.uint32)
        bits &= np.uint32(rng.integers(0, 1 << 32))
        bits |= np.uint32(rng.integers(0, 1 << 32)) & np.uint32(rng.integers(0, 1 << 32))
        count = int(rng.integers(1, size + 1))
        array = bits.view(np.float32)
        order = np.argsort(-(bits & 0x7FFFFFFF).astype(np.int64), kind="stable")
        assert positions(array, count / size, take).tolist() == sorted(order[:count].tolist()), turn


@pytest.mark.parametrize("before", [False, True])
@pytest.mark.parametrize("kind", ["normal", "zeros", "special"])
def test_the_rest_is_the_sum_without_what_is_kept(kind, before, take):
    checked = 0
    for size in SIZES:
        array, rest = contents(kind, size), np.full(size, 7.0, np.float32)
        residual = np.roll(contents("zeros", size), 1) if before else None
        given = [each.tobytes() for each in (array, residual) if each is not None]
        total = array.copy() if residual is None else residual + array
        index, value = take(array, residual, rest, 0.05)
        assert index.tolist() == by_sorting(total, 0.05)
        assert value.tobytes() == total[index].tobytes()
        total[index] = -0.0
        assert rest.tobytes() == total.tobytes()
        assert [each.tobytes() for each in (array, residual) if each is not None] == given
        checked += size
    assert checked == sum(SIZES)


@pytest.mark.parametrize("share", [0.01, 0.4])
def test_a_block_tells_nothing_about_the_next_one(share):
    """Compiled code guesses from a block which elements of the next one to look at."""
    rng = np.random.default_rng(SEED)
    blocks = [rng.standard_normal(BLOCK).astype(np.float32) for _ in range(12)]
    scales = [1, 1, 1e-3, 1e-30, 1e6, 1e38, 1e-42, 1, 0, 1, np.nan, 1]
    with np.errstate(over="ignore"):
        array = np.concatenate([b * np.float32(s) for b, s in zip(blocks, scales, strict=True)])
    array[3 * BLOCK : 3 * BLOCK + 700] = np.inf
    array[9 * BLOCK : 10 * BLOCK] = 3.0
    residual = rng.permutation(array)
    index, value = taker()(array, None, None, share)
    np.testing.assert_array_equal(index, by_sorting(array, share))
    assert value.tobytes() == array[index].tobytes()
    rests = np.empty_like(array), np.empty_like(array)
    with np.errstate(over="ignore", invalid="ignore"):
        outcomes = [
            take(array, residual, rest, share)
            for take, rest in zip((taker(), take_largest), rests, strict=True)
        ]
    for one, other in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(*rests)
    np.testing.assert_array_equal(*(np.signbit(each) & ~np.isnan(each) for each in rests))


def test_arrays_that_do_not_fit_are_refused_by_compiled_code():
    take, good = taker(), np.zeros(10, np.float32)
    for wrong in (np.zeros(9, np.float32), np.zeros(10), np.zeros((2, 5), np.float32)):
        for arrays in ((good, wrong, None), (good, None, wrong)):
            with pytest.raises(ValueError, match="float32 of one dimension and size 10"):
                take(*arrays, 0.5)
    fixed = np.zeros(10, np.float32)
    fixed.flags.writeable = False
    for rest in (np.zeros(20, np.float32)[::2], fixed):
        with pytest.raises(ValueError, match="contiguous and writable"):
            take(good, None, rest, 0.5)
    assert fixed.tolist() == [0.0] * 10


def test_at_least_one_element_of_each_block_is_kept_and_none_of_nothing():
    assert [kept_of_block(size, 0.01) for size in (0, 1, 49, 149, 151, 250, 350)] == [
        0, 1, 1, 1, 2, 2, 4,
    ]  # fmt: skip
    assert kept_of(3 * BLOCK + 1, 1e-9) == 4
    assert kept_of(3 * BLOCK + 5, 1.0) == 3 * BLOCK + 5
    assert positions(np.empty(0, np.float32), 0.5).tolist() == []


@pytest.mark.parametrize("form", ["fp32", "fp16", "bf16"])
def test_what_is_sent_and_what_stays_add_up_exactly(form):
    rng = np.random.default_rng(SEED)
    compression = Compression(share=0.1, format=form)
    residual, checked = None, 0
    for scale in (1.0, 1e-3, 1e4, 1.0, 1e-6):
        gradient = (rng.standard_normal(5003) * scale).astype(np.float32)
        total = gradient if residual is None else residual + gradient
        done = compression.compress(gradient, residual)
        sent = np.zeros(5003, np.float64)
        sent[done.index] = convert.widen(done.value)
        assert (sent + done.residual.astype(np.float64) == total.astype(np.float64)).all()
        assert len(done.index) == compression.kept_of(5003) == 500
        residual = done.residual
        checked += total.size
    assert checked == 5 * 5003


def test_whole_gradients_add_up_over_steps_where_sums_are_exact():
    rng = np.random.default_rng(SEED)
    compression = Compression(share=0.05)
    sent, total, residual = np.zeros(1000), np.zeros(1000), None
    for _ in range(50):
        gradient = rng.integers(-1000, 1000, 1000).astype(np.float32)
        done = compression.compress(gradient, residual)
        sent[done.index] += done.value
        total += gradient
        residual = done.residual
    assert (sent + residual == total).all()
    assert np.abs(residual).max() > 0


@pytest.mark.parametrize("feedback", [True, False])
def test_keeping_everything_keeps_every_bit(feedback):
    special = np.array([0.0, -0.0, np.nan, np.inf, -np.inf, 1e-45, -1e-45, 3.0], np.float32)
    compression = Compression(share=1.0, error_feedback=feedback)
    done = compression.compress(special, None)
    for gradient in (special, special[::-1].copy()):
        done = compression.compress(gradient, done.residual)
        assert done.value.tobytes() == gradient.tobytes()
        assert done.index.tolist() == list(range(8))


def test_what_is_not_finite_is_sent_and_leaves_nothing_behind():
    gradient = np.array([1.0, np.inf, 2.0, np.nan, -np.inf, 3.0], np.float32)
    done = Compression(share=0.5).compress(gradient, None)
    assert done.index.tolist() == [1, 3, 4]
    assert done.residual.tolist() == [1.0, 0.0, 2.0, 0.0, 0.0, 3.0]
    assert done.value.tobytes() == gradient[[1, 3, 4]].tobytes()


@pytest.mark.parametrize(
    ("form", "limit"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)]
)
def test_numbers_too_large_for_16_bits_are_bounded_and_the_rest_stays(form, limit):
    gradient = np.array([3.4e38, -3.4e38, 1.0, np.inf, np.nan], np.float32)
    done = Compression(share=1.0, format=form).compress(gradient, None)
    widened = convert.widen(done.value)
    assert widened[:4].tolist() == [limit, -limit, 1.0, np.inf]
    assert np.isnan(widened[4])
    assert (widened[:3] + done.residual[:3]).tolist() == gradient[:3].tolist()
    assert done.residual[3:].tolist() == [0.0, 0.0]


def test_compression_does_not_touch_what_it_is_given():
    gradient, residual = np.ones(8, np.float32), np.full(8, 2.0, np.float32)
    for before in (None, residual):
        done = Compression(share=0.5).compress(gradient, before)
        assert not np.shares_memory(done.residual, gradient)
        assert not np.shares_memory(done.residual, residual)
    assert gradient.tolist() == [1.0] * 8
    assert residual.tolist() == [2.0] * 8


@pytest.mark.parametrize("share", [0, -0.1, 1.01, float("nan"), float("inf"), "0.1", True, None])
def test_a_share_that_is_none(share):
    with pytest.raises(HyperparameterError, match=r"^compression must be a share above 0"):
        Compression(share=share)


def test_forms_and_formats_that_nobody_knows():
    with pytest.raises(HyperparameterError, match="compression_form must be one of"):
        Compression(share=0.1, form="sparse")
    with pytest.raises(HyperparameterError, match="compression_format must be one of"):
        Compression(share=0.1, format="fp8")


@pytest.mark.parametrize("dtype", convert.FORMATS, ids=str)
def test_words_are_the_bits_of_the_tensor(dtype):
    torch.manual_seed(SEED)
    tensor = torch.randn(7, 9).to(dtype).t()
    words = convert.to_words(tensor)
    assert convert.widen(words).tobytes() == convert.to_float32(tensor).tobytes()
    assert words.nbytes == 63 * dtype.itemsize
    narrowed = convert.narrow(convert.to_float32(tensor), convert.NAMES[dtype])
    assert narrowed.tobytes() == words.tobytes()
