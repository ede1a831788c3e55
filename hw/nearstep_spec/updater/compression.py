"""Formats of compressed gradients, and their errors."""

from enum import IntEnum

__all__ = ["PairCause", "ValueFormat"]


class ValueFormat(IntEnum):
    """Format of the values of pairs."""

    FP32 = 0
    FP16 = 1
    BF16 = 2


class PairCause(IntEnum):
    """Error that ended a decompression."""

    NONE = 0
    TRUNCATED = 1  # a stream ended before the announced number of pairs
    RANGE = 2  # an index is not below the number of elements
    ORDER = 3  # an index out of order: fused, below the previous one; scatter, in an earlier chunk
