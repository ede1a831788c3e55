"""The elements of largest magnitude in each block of an array.

Ref: Smart-Infinity, section IV-C.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

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


def largest(
    array: NDArray[np.float32],
    share: float,
    prepare: Callable[[slice], None] | None = None,
) -> NDArray[np.intp]:
    """Positions of the elements that are kept, ascending.

    Magnitudes are compared as bit patterns without their sign: NaN is above infinity, and that
    above every number. Of equal magnitudes those that come first are kept.

    Parameters
    ----------
    array: NDArray[np.float32]
        Of one dimension.
    share: float
        Above 0, at most 1; see :func:`kept_of_block`.
    prepare: Callable[[slice], None] | None
        Called with each block just before it is looked at: what it writes there is still in the
        cache then.
    """
    found: list[NDArray[np.intp]] = [np.empty(0, np.intp)]
    room = np.empty(min(array.size, BLOCK), np.uint32)
    for start in range(0, array.size, BLOCK):
        block = slice(start, min(start + BLOCK, array.size))
        if prepare is not None:
            prepare(block)
        keys = np.bitwise_and(
            array[block].view(np.uint32), _MAGNITUDE, out=room[: block.stop - start]
        )
        kept = _largest_of(keys, kept_of_block(keys.size, share))
        kept += start
        found.append(kept)
    return np.concatenate(found)


def _largest_of(keys: NDArray[np.uint32], count: int) -> NDArray[np.intp]:
    """Positions of the ``count`` largest, ascending."""
    if count == keys.size:
        return np.arange(keys.size)
    sample = keys[::SAMPLED]
    rank = math.ceil(sample.size * count / keys.size * 1.5) + 8
    if rank < sample.size // 2:  # candidates: all from a key on that more than enough may reach
        least = np.partition(sample, sample.size - rank)[sample.size - rank]
        candidates = np.flatnonzero(keys >= least)
        if candidates.size >= count:
            return candidates[_exactly(keys[candidates], count)]
    return _exactly(keys, count)


def _exactly(keys: NDArray[np.uint32], count: int) -> NDArray[np.intp]:
    """Positions of the ``count`` largest, ascending, by looking at all."""
    if count == keys.size:
        return np.arange(keys.size)
    least = np.partition(keys, keys.size - count)[keys.size - count]
    mask = keys >= least
    surplus = np.count_nonzero(mask) - count
    if surplus:
        mask[np.flatnonzero(keys == least)[-surplus:]] = False
    return np.flatnonzero(mask)
