"""Page-aligned arrays, and the pool that reuses their memory."""

from __future__ import annotations

import numpy as np

from nearstep.storage.aligned import ALIGNMENT, AlignedPool, aligned_empty, padded


def test_arrays_begin_at_a_page_and_are_zeros() -> None:
    made = [aligned_empty(3), aligned_empty((2, 5000), np.float16), aligned_empty((0, 4))]
    assert [(each.shape, each.dtype) for each in made] == [
        ((3,), np.float32),
        ((2, 5000), np.float16),
        ((0, 4), np.float32),
    ]
    assert not any(each.any() or each.ctypes.data % ALIGNMENT for each in made)
    assert bytes(padded(b"abc")) == b"abc" + bytes(ALIGNMENT - 3)


def test_memory_is_reused_when_no_view_is_left_and_freed_beyond_the_limit() -> None:
    pool = AlignedPool()
    first = pool.empty(1000, np.uint8)
    first[:] = 1
    view = first[10:]
    del first
    other = pool.empty(1000, np.uint8)
    assert not other.any(), "a view of the first array is there"
    del view
    again = pool.empty(1000, np.uint8)
    assert again.all(), "its memory"
    del again
    large = pool.empty(3000, np.uint8)
    pool.limit = 6000  # 5000 are held, 1000 of them in no array
    kept = pool.empty(1000, np.uint8)
    assert kept.all()
    del kept
    larger = pool.empty(2000, np.uint8)
    assert not pool.empty(1000, np.uint8).any(), "it was freed"
    assert not large.any()
    assert not larger.any()
    assert pool.empty(0).shape == (0,)
