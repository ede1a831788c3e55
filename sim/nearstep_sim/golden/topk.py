"""Bit-exact models of Top-K decompression: pairs of index and value to a dense gradient."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden import fp
from nearstep_spec.fp import BF16, FP16
from nearstep_spec.updater.compression import PairCause, ValueFormat

__all__ = ["Decompressed", "decompress", "first_wrong_pair", "widen"]


@dataclass(frozen=True)
class Decompressed:
    """Result of a decompression.

    Attributes
    ----------
    dense : patterns of binary32: of all elements, or of those output before an early end.
    duplicates : pairs overridden by a later one of the same index; valid if `cause` is NONE.
    position : pairs before the first that is missing or wrong; 0 where `cause` is NONE.
    """

    dense: NDArray[np.uint32]
    duplicates: int
    cause: PairCause
    position: int


def widen(values: NDArray[Any], form: ValueFormat) -> NDArray[np.uint32]:
    """Patterns of values to patterns of binary32, exactly; FP16 and BF16 NaN to the default NaN."""
    if form == ValueFormat.FP32:
        return values.astype(np.uint32)
    source = FP16 if form == ValueFormat.FP16 else BF16
    return fp.widen32(values.astype(np.uint16), source).view(np.uint32)


def first_wrong_pair(index: NDArray[np.uint32], *, count: int, group: int) -> tuple[PairCause, int]:
    """Return the error and the position of the first index out of range or out of order.

    Parameters
    ----------
    count, group : as in `decompress`.

    Returns
    -------
    PairCause : NONE if all are good.
    int : 0 if all are good.
    """
    key = index if group == 1 else index // np.uint32(group)
    beyond = index >= count
    early = np.zeros_like(beyond)
    early[1:] = key[1:] < key[:-1]
    wrong = beyond | early
    if not wrong.any():
        return PairCause.NONE, 0
    position = int(wrong.argmax())
    return PairCause.RANGE if beyond[position] else PairCause.ORDER, position


def decompress(
    index: NDArray[np.uint32],
    value: NDArray[np.uint32],
    *,
    pairs: int,
    count: int,
    group: int,
    granule: int,
) -> Decompressed:
    """Decompress the received pairs.

    Parameters
    ----------
    index, value : the received pairs, values as patterns of binary32 (see `widen`). Fewer than
        `pairs` is a truncated stream; pairs beyond `pairs` are ignored.
    pairs, count : announced pairs, and elements.
    group : elements within which the order is free; 1 for sorted indices.
    granule : elements output at once: a beat of the fused form, a chunk of the scatter form. A run
        that ends early outputs the granules before that of the last good pair.
    """
    present = min(len(index), pairs)
    index, value = index[:present], value[:present]
    cause, position = first_wrong_pair(index, count=count, group=group)
    if cause == PairCause.NONE and present < pairs:
        cause, position = PairCause.TRUNCATED, present
    good = present if cause == PairCause.NONE else position
    emitted = count
    if cause != PairCause.NONE:
        emitted = int(index[good - 1]) // granule * granule if good else 0
    dense = np.zeros(count, np.uint32)
    dense[index[:good]] = value[:good]  # of equal indices numpy keeps the last
    named = np.zeros(count, np.bool_)
    named[index[:good]] = True
    duplicates = good - int(np.count_nonzero(named))
    return Decompressed(dense[:emitted], duplicates, cause, position)
