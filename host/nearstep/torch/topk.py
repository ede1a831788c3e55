"""The elements of largest magnitude in each block of an array.

Ref: Smart-Infinity, section IV-C.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 16
"""Elements that are compared with one another. An array is cut into blocks of so many from its
first element on; the last one may be shorter."""

SAMPLED = 64
"""Of so many elements of a block one is looked at first, to guess which may be kept."""

NOTHING = np.float32(-0.0)
"""Added to a number it changes no bit of it; +0 would change -0."""

_MAGNITUDE = np.uint32(0x7FFFFFFF)


def kept_of_block(size: int, share: float) -> int:
    """How many elements of a block of `size` are kept: max(1, round(share x size)), and none of
    none.

    Ties are rounded to even.
    """
    return min(size, max(1, round(share * size)))


def kept_of(size: int, share: float) -> int:
    """How many elements of an array of `size` are kept."""
    blocks, rest = divmod(size, BLOCK)
    return blocks * kept_of_block(BLOCK, share) + kept_of_block(rest, share)


def largest_of(array: NDArray[np.float32], count: int) -> NDArray[np.intp]:
    """Positions of the `count` elements of largest magnitude of one block, ascending.

    Magnitudes are compared as bit patterns without their sign: NaN is above infinity, and that
    above every number. Of equal magnitudes those that come first are kept.

    Parameters
    ----------
    array : of one dimension, contiguous.
    count : at most its size.
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


def take_largest(
    gradient: NDArray[np.float32],
    residual: NDArray[np.float32] | None,
    rest: NDArray[np.float32] | None,
    share: float,
) -> tuple[NDArray[np.intp], NDArray[np.float32]]:
    """The elements of each block that are kept: their positions, ascending, and their values.

    Parameters
    ----------
    gradient : of one dimension, contiguous.
    residual : what is added to it, if there is a `rest`.
    rest : becomes the sum, with -0 for what is kept: added to a number it changes no bit of it.
        None: nothing stays. The others are left as they are, and share no memory with it. Of two
        NaN either may be the sum.
    share : above 0, at most 1; see `kept_of_block`.
    """
    index = np.empty(kept_of(gradient.size, share), np.intp)
    value = np.empty(index.size, np.float32)
    taken = 0
    for start in range(0, gradient.size, BLOCK):
        block = slice(start, min(start + BLOCK, gradient.size))
        part = gradient[block]
        if rest is not None:  # what is written here is still in the cache below
            if residual is None:
                rest[block] = part
            else:
                np.add(residual[block], part, out=rest[block])
            part = rest[block]
        kept = largest_of(part, kept_of_block(part.size, share))
        stop = taken + kept.size
        value[taken:stop] = part[kept]
        np.add(kept, start, out=index[taken:stop])
        if rest is not None:
            part[kept] = NOTHING
        taken = stop
    return index, value


def _exactly(keys: NDArray[np.uint32], count: int) -> NDArray[np.bool_]:
    """Which are the `count` largest, by looking at all."""
    if count == keys.size:
        return np.ones(count, np.bool_)
    least = np.partition(keys, keys.size - count)[keys.size - count]
    mask: NDArray[np.bool_] = keys >= least
    surplus = np.count_nonzero(mask) - count
    if surplus:
        mask[np.flatnonzero(keys == least)[-surplus:]] = False
    return mask
