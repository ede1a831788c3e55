"""Gradients that are compressed where they are, against the host's own code, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from nearstep.torch import convert, select
from nearstep.torch.compression import Compression
from nearstep.torch.topk import BLOCK, kept_of
from nearstep.torch.topk import take_largest as take_largest_of_array

from .test_topk import SEED, by_sorting, contents

SIZES = [0, 1, 2, 101, BLOCK - 1, BLOCK, BLOCK + 1]
SHARES = [1e-9, 0.05, 0.999, 1.0]
KINDS = ["normal", "ties", "zeros", "equal", "special"]
FORMATS = ["fp32", "fp16", "bf16"]


def assert_equal(compression, gradient, before):
    """Both ways to compress have the same bits, and change nothing that they are given; the
    elements compared, and what is left."""
    given = [each.tobytes() for each in (gradient, before) if each is not None]
    expected = compression.compress(gradient, before)
    residual = None if before is None else torch.from_numpy(before)
    made = select.select_largest(compression, torch.from_numpy(gradient), residual)
    assert [each.tobytes() for each in (gradient, before) if each is not None] == given
    value_bytes = {"fp32": 4, "fp16": 2, "bf16": 2}[compression.format]
    assert made.nbytes == expected.index.size * (4 + value_bytes)
    assert made.residual is None or made.residual.data_ptr() not in (
        gradient.ctypes.data,
        0 if before is None else before.ctypes.data,
    )
    found = made.compressed()
    np.testing.assert_array_equal(found.index, expected.index)
    assert found.index.dtype == expected.index.dtype
    assert found.value.dtype == expected.value.dtype
    assert found.value.tobytes() == expected.value.tobytes()
    if expected.residual is None:
        assert found.residual is None
        return expected.index.size, None
    assert found.residual.numpy().tobytes() == expected.residual.tobytes()
    return expected.index.size + gradient.size, expected.residual


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_what_the_host_keeps(kind, monkeypatch):
    monkeypatch.setattr(select, "BLOCKS_AT_ONCE", 2)
    compared = 0
    shares = SHARES if kind == "ties" else [0.05, 1.0]
    sizes = [*SIZES, 5 * BLOCK + 777] if kind == "ties" else SIZES
    for size in sizes:
        array = contents(kind, size)
        for share in shares:
            kept = select.take_largest(torch.from_numpy(array), share).numpy()
            np.testing.assert_array_equal(kept, take_largest_of_array(array, None, None, share)[0])
            compared += kept.size
    print(f"seed {SEED}: {compared} positions compared")
    assert compared == sum(kept_of(size, share) for size in sizes for share in shares)


def test_every_pattern_has_its_place():
    """Bits of all kinds, of which few differ, or many."""
    rng = np.random.default_rng(SEED)
    for turn in range(100):
        size = int(rng.integers(1, 4000))
        bits = rng.integers(0, 1 << 32, size, dtype=np.uint32)
        bits &= np.uint32(rng.integers(0, 1 << 32))
        bits |= np.uint32(rng.integers(0, 1 << 32)) & np.uint32(rng.integers(0, 1 << 32))
        array, share = bits.view(np.float32), int(rng.integers(1, size + 1)) / size
        kept = select.take_largest(torch.from_numpy(array), share)
        assert kept.tolist() == by_sorting(array, share), turn


@pytest.mark.parametrize("feedback", [True, False])
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_sent_and_what_stays_have_the_bits_of_the_host(form, feedback):
    rng = np.random.default_rng(SEED)
    compared = 0
    for share, size in itertools.product((0.02, 1.0), (1, BLOCK + 1)):
        compression = Compression(share=share, format=form, error_feedback=feedback)
        residual = None
        for kind, scale in zip(KINDS, (1.0, 1e4, 1e-6, 3e38, 1.0), strict=True):
            with np.errstate(over="ignore"):
                gradient = rng.permutation(contents(kind, size)) * np.float32(scale)
            number, residual = assert_equal(compression, gradient, residual)
            compared += number
    kept = sum(kept_of(size, share) for share in (0.02, 1.0) for size in (1, BLOCK + 1))
    assert compared == 5 * (kept + feedback * 2 * (1 + BLOCK + 1))


@pytest.mark.parametrize("dtype", convert.FORMATS, ids=str)
def test_a_gradient_of_any_layout_is_taken_in_logical_order(dtype):
    torch.manual_seed(SEED)
    gradient = torch._neg_view(torch.randn(70, 90).to(dtype).t())
    compression = Compression(share=0.1, format="bf16")
    expected = compression.compress(convert.to_float32(gradient), None)
    found = select.select_largest(
        compression, select.flat(gradient, gradient.device), None
    ).compressed()
    assert found.index.size == 630
    np.testing.assert_array_equal(found.index, expected.index)
    assert found.value.tobytes() == expected.value.tobytes()
    assert found.residual.numpy().tobytes() == expected.residual.tobytes()


@pytest.mark.deep
def test_random_gradients_over_steps():
    rng = np.random.default_rng(SEED)
    compared = 0
    for turn in range(50):
        size = int(rng.choice([1, 2, 500, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK + 9]))
        compression = Compression(
            share=float(rng.choice([1e-9, 0.01, 0.3, 0.999, 1.0])),
            format=str(rng.choice(FORMATS)),
            error_feedback=bool(rng.random() < 0.7),
        )
        residual = None
        for _ in range(3):
            gradient = rng.permutation(contents(str(rng.choice(KINDS)), size))
            gradient *= np.float32(10.0 ** rng.integers(-30, 5))
            number, residual = assert_equal(compression, gradient, residual)
            assert number >= kept_of(size, compression.share), turn
            compared += number
    print(f"seed {SEED}: {compared} elements compared")
