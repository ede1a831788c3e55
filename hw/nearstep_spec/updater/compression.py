"""Names of what compressed gradients are made of, and of what can be wrong with them."""

from enum import IntEnum

__all__ = ["PairCause", "ValueFormat"]


class ValueFormat(IntEnum):
    """Format of the values of pairs."""

    FP32 = 0
    FP16 = 1
    BF16 = 2


class PairCause(IntEnum):
    """What ended a decompression early."""

    NONE = 0
    TRUNCATED = 1  # a stream ended before the announced number of pairs
    RANGE = 2  # an index is not below the number of elements
    ORDER = 3  # an index came too late: fused, it is below the one before; scatter, its chunk is
