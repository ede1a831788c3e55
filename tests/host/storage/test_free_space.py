"""Free blocks, beside a set of numbers."""

from __future__ import annotations

import numpy as np
import pytest

from nearstep.storage.drive_errors import DriveFullError, StorageError
from nearstep.storage.extents import Run
from nearstep.storage.free_space import FreeSpace
from nearstep.storage.space import Space
from nearstep.storage.superblock import FIRST_FREE


def test_what_is_taken_was_free_and_what_is_given_back_is_one_piece() -> None:
    print("seed 4")
    rng = np.random.default_rng(4)
    space, free, held = FreeSpace([(3, 500)]), set(range(3, 503)), []
    taken = 0
    for _ in range(3_000):
        if held and (rng.random() < 0.5 or not free):
            start, count = held.pop(int(rng.integers(0, len(held))))
            space.release(start, count)
            free |= set(range(start, start + count))
        else:
            wanted = int(rng.integers(1, 40))
            longest = max(_lengths(free))
            start, count = space.take(wanted)
            assert count == min(wanted, longest)
            assert set(range(start, start + count)) <= free
            free -= set(range(start, start + count))
            held.append((start, count))
            taken += 1
        assert space.blocks == len(free)
    assert taken > 1_000
    for start, count in held:
        space.release(start, count)
    assert space.take(500) == (3, 500)


def _lengths(free: set[int]) -> list[int]:
    lengths, run = [0], 0
    for block in range(3, 504):
        run = run + 1 if block in free else 0
        lengths.append(run)
    return lengths


def test_what_a_set_uses_is_not_free() -> None:
    used = np.array([[0, 10, 5], [1, 3, 2], [0, FIRST_FREE, 1]])
    space = Space([20, 8], used)
    assert space.free == [20 - FIRST_FREE - 6, 3]
    taken = space.take(14, 0)
    assert sorted(taken) == [Run(0, 4, 6), Run(0, 15, 5), Run(1, 5, 3)]
    with pytest.raises(DriveFullError) as caught:
        space.take(1, 1)
    assert (caught.value.expected, caught.value.actual) == (4096, 0)
    space.release(taken)
    assert space.free == [11, 3]
    with pytest.raises(StorageError, match="same block"):
        Space([20], np.array([[0, 5, 5], [0, 9, 2]]))
