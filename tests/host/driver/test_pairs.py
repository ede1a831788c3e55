"""Wrong pairs of index and value, on every device whose kernel takes pairs; `test_conformance` has
right ones."""

from __future__ import annotations

import numpy as np
import pytest

from nearstep.errors import PairError, PairOrderError, PairRangeError

from .job import Job
from .patterns import gradients, indices

FORMS = ("fused", "scatter")


def group_of(device, form):
    return 1 if form == "fused" else device.config.block_elements


def bad(kind, index, position, device, count):
    """Spoil the pair at a position; the error that it must give."""
    block = device.config.block_elements
    if kind == "index of the end":
        index[position] = count
    elif kind == "largest index":
        index[position] = 0xFFFF_FFFF
    elif kind == "below the one before":
        index[position] = index[position - 1] - 1
    elif kind == "block before":
        index[position] = index[position - 1] // block * block - 1
    return PairRangeError if kind in ("index of the end", "largest index") else PairOrderError


BAD = [
    ("fused", "index of the end"),
    ("fused", "largest index"),
    ("fused", "below the one before"),
    ("fused", "block before"),
    ("scatter", "index of the end"),
    ("scatter", "largest index"),
    ("scatter", "block before"),
]


@pytest.mark.parametrize(("form", "kind"), BAD)
@pytest.mark.parametrize("value_form", ["fp32", pytest.param("bf16", marks=pytest.mark.deep)])
def test_one_bad_pair_anywhere_is_told_and_nothing_is_written(full, form, kind, value_form):
    """The first bad pair counts, whatever comes after it."""
    count, pairs = 4099, 2501
    block = full.config.block_elements
    work = Job(full, count, 8)
    good = indices(work.rng, count, pairs, group_of(full, form))
    good[good < block] = block  # so that there is a block before
    good = good[np.argsort(good // group_of(full, form), kind="stable")]
    values = gradients(work.rng, pairs, value_form)
    copy = work.copy("fp16")
    copy.fill(7)
    positions = [1, 2, 3, 4, 5, 15, 16, 17, 1000, pairs - 2, pairs - 1]
    if kind in ("index of the end", "largest index"):
        positions.insert(0, 0)
    refused = 0
    for position in positions:
        index = good.copy()
        error = bad(kind, index, position, full, count)
        index[position + 2 :: 7] = count  # bad, but later
        g = work.pairs(index, values, form)
        with pytest.raises(error) as caught:
            work.run("adam", g=g, step=1, copy_out=copy)
        told = caught.value
        assert isinstance(told, PairError)
        assert (told.position, told.stream) == (position, "INDEX_READ")
        assert told.address == g.index.address + 4 * position
        assert told.cause == ("PAIR_RANGE" if error is PairRangeError else "PAIR_ORDER")
        assert f"of pair {position}" in str(told)
        assert (told.committed, told.count) == (0, count)
        kernel = full.channels[0].kernel
        assert (kernel.status.done, kernel.status.error, kernel.status.busy) == (0, 1, 0)
        assert (kernel.committed.value, kernel.write_beats.value) == (0, 0)
        closed = [kernel[f"window{i}_permissions"].bits for i in range(full.config.windows)]
        assert closed == [0] * full.config.windows
        assert work.check_untouched() == 3 * count
        assert np.all(copy.read() == 7)
        g.index.free()
        g.value.free()
        refused += 1
    assert refused >= 11
    work.run("adam", g=work.pairs(good, values, form), step=1, copy_out=copy)
    assert work.check() == 4 * count


@pytest.mark.parametrize("form", FORMS)
def test_out_of_range_and_then_out_of_order_is_out_of_range(full, form):
    work = Job(full, 300, 9)
    g = work.pairs(np.array([299, 0xFFFF_FFFF, 0], np.uint32), np.ones(3, np.float32), form)
    with pytest.raises(PairRangeError) as caught:
        work.run("adam", g=g, step=1)
    assert caught.value.position == 1


def test_free_order_within_a_block_is_for_scatter_alone(full):
    work = Job(full, 300, 10)
    index, values = np.array([3, 1, 2, 127, 0], np.uint32), np.ones(5, np.float32)
    with pytest.raises(PairOrderError) as caught:
        work.run("adam", g=work.pairs(index, values, "fused"), step=1)
    assert caught.value.position == 1
    work.run("adam", g=work.pairs(index, values, "scatter"), step=1)
    assert work.check() == 900


@pytest.mark.parametrize("form", FORMS)
def test_the_last_of_equal_indices_counts(full, form):
    work = Job(full, 300, 2)
    index = np.repeat(np.array([0, 127, 128, 299], np.uint32), 50)
    values = np.arange(200, dtype=np.float32)
    work.run("sgd", g=work.pairs(index, values, form), lr=1.0)
    dense = np.zeros(300, np.float32)
    dense[[0, 127, 128, 299]] = [49, 99, 149, 199]
    np.testing.assert_array_equal(work.dense(), dense)
    assert work.check() == 900
