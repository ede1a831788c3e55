"""The elements of largest magnitude in each block of an array.

Ref: Smart-Infinity, section IV-C.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Largest

BLOCK = 1 << 16
"""Elements that are compared with one another. An array is cut into blocks of so many from its
first element on; the last one may be shorter."""

SAMPLED = 64
"""Of so many elements of a block one is looked at first, to guess which may be kept."""

_MAGNITUDE = np.uint32(0x7FFFFFFF)


def kept_of_block(size: int, share: float) -> int:
    """How many elements of a block of ``size`` are kept: max(1, round(share x size)), and none of
    none. Halves are rounded to even."""
    return min(size, max(1, round(share * size)))


def kept_of(size: int, share: float) -> int:
    """How many elements of an array of ``size`` are kept."""
    blocks, rest = divmod(size, BLOCK)
    return blocks * kept_of_block(BLOCK, share) + kept_of_block(rest, share)


def largest_of(array: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Positions of the ``count`` elements of largest magnitude of one block, ascending.

    Magnitudes are compared as bit patterns without their sign: NaN is above infinity, and that
    above every number. Of equal magnitudes those that come first are kept.

    Parameters
    ----------
    array: NDArray[np.float32]
        Of one dimension, contiguous.
    count: int
        At most its size.
    """
    if count == array.size:
        return np.arange(array.size)
    candidates: NDArray[np.intp]
    keys = array.view(np.uint32) & _MAGNITUDE
    sample = keys[::SAMPLED]
    rank = math.ceil(sample.size * count / keys.size * 1.5) + 8
    if rank < sample.size // 2:  # candidates: all from a key on that more than enough may reach
        least = np.partition(sample, sample.size - rank)[sample.size - rank]
        candidates = (keys >= least).nonzero()[0]
        if candidates.size >= count:
            candidates = candidates[_exactly(keys[candidates], count)]
            return candidates
    return np.flatnonzero(_exactly(keys, count))


def largest(
    array: NDArray[np.float32],
    share: float,
    *,
    prepare: Callable[[slice], None] | None = None,
    find: Largest = largest_of,
) -> Iterator[tuple[slice, NDArray[np.intp]]]:
    """Each block of an array, and where in the block the elements are that are kept, ascending.

    Parameters
    ----------
    array: NDArray[np.float32]
        Of one dimension, contiguous.
    share: float
        Above 0, at most 1; see :func:`kept_of_block`.
    prepare: Callable[[slice], None] | None
        Called with each block just before it is looked at. What it writes there is still in the
        cache then, and when the block is yielded.
    find: Largest
        Does what :func:`largest_of` does.
    """
    for start in range(0, array.size, BLOCK):
        block = slice(start, min(start + BLOCK, array.size))
        if prepare is not None:
            prepare(block)
        yield block, find(array[block], kept_of_block(block.stop - start, share))


def _exactly(keys: NDArray[np.uint32], count: int) -> NDArray[np.bool_]:
    """Which are the ``count`` largest, by looking at all."""
    if count == keys.size:
        return np.ones(count, np.bool_)
    least = np.partition(keys, keys.size - count)[keys.size - count]
    mask: NDArray[np.bool_] = keys >= least
    surplus = np.count_nonzero(mask) - count
    if surplus:
        mask[np.flatnonzero(keys == least)[-surplus:]] = False
    return mask
