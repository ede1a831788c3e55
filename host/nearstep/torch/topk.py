"""The elements of largest magnitude in each block of an array.

Ref: Smart-Infinity, section IV-C.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

BLOCK = 1 << 16
"""Elements that are compared with one another. An array is cut into blocks of so many from its
first element on; the last one may be shorter."""

_MAGNITUDE = np.uint32(0x7FFFFFFF)


def kept_of_block(size: int, share: float) -> int:
    """How many elements of a block of ``size`` are kept: max(1, round(share x size)), and none of
    none. Halves are rounded to even."""
    return min(size, max(1, round(share * size)))


def kept_of(size: int, share: float) -> int:
    """How many elements of an array of ``size`` are kept."""
    blocks, rest = divmod(size, BLOCK)
    return blocks * kept_of_block(BLOCK, share) + kept_of_block(rest, share)


def largest(array: NDArray[np.float32], share: float) -> NDArray[np.intp]:
    """Positions of the elements that are kept, ascending.

    Magnitudes are compared as bit patterns without their sign: NaN is above infinity, and that
    above every number. Of equal magnitudes those that come first are kept.

    Parameters
    ----------
    array: NDArray[np.float32]
        Of one dimension.
    share: float
        Above 0, at most 1; see :func:`kept_of_block`.
    """
    keys = array.view(np.uint32) & _MAGNITUDE
    whole = keys.size // BLOCK * BLOCK
    kept = [_largest_of_rows(keys[:whole].reshape(-1, BLOCK), kept_of_block(BLOCK, share))]
    if keys.size > whole:
        rest = keys[whole:].reshape(1, -1)
        kept.append(whole + _largest_of_rows(rest, kept_of_block(rest.size, share)))
    return np.concatenate(kept)


def _largest_of_rows(keys: NDArray[np.uint32], count: int) -> NDArray[np.intp]:
    """Positions in the flattened array of the ``count`` largest of each row."""
    size = keys.shape[1]
    if not keys.size or count == size:
        return np.arange(keys.size)
    least = np.partition(keys, size - count, axis=1)[:, size - count]
    mask = keys >= least[:, None]
    surplus = np.count_nonzero(mask, axis=1) - count
    for row in np.flatnonzero(surplus):
        ties = np.flatnonzero(keys[row] == least[row])
        mask[row, ties[-surplus[row] :]] = False
    return np.flatnonzero(mask)
