"""Floating point, bit-exact: every operation on patterns with flags, and binary32 values alone.

Two layers. ``add sub mul fma div sqrt convert`` take bit patterns of any format of up to 32 bits
and return patterns and exception flags; they are integer arithmetic throughout. ``add32 ... fma32``
take and return ``float32`` arrays, without flags, at the speed of numpy.

Every result is rounded once, to nearest, ties to even. A NaN result is the default quiet NaN.
Flags: inexact 1, underflow 2 (tiny after rounding, and inexact), overflow 4, divide by zero 8,
invalid 16 (also for a signalling NaN operand, and for 0 x inf + NaN).

Ref: IEEE 754-2019, 4.3.1, 6.2, 7.
"""

import numpy as np
from numpy.typing import NDArray

__all__ = ["add32", "canonical32", "div32", "fma32", "mul32", "sqrt32", "sub32"]

F32 = NDArray[np.float32]

QUIET_NAN32 = np.uint32(0x7FC00000).view(np.float32)


def canonical32(x: F32) -> F32:
    """``x`` with every NaN replaced by the default quiet NaN 0x7FC00000."""
    return np.where(np.isnan(x), QUIET_NAN32, x)


def add32(a: F32, b: F32) -> F32:
    """a + b, float32, rounded once."""
    with np.errstate(all="ignore"):
        return canonical32(_f32(a) + _f32(b))


def sub32(a: F32, b: F32) -> F32:
    """a - b, float32, rounded once."""
    with np.errstate(all="ignore"):
        return canonical32(_f32(a) - _f32(b))


def mul32(a: F32, b: F32) -> F32:
    """a * b, float32, rounded once."""
    with np.errstate(all="ignore"):
        return canonical32(_f32(a) * _f32(b))


def div32(a: F32, b: F32) -> F32:
    """a / b, float32, rounded once."""
    with np.errstate(all="ignore"):
        return canonical32(_f32(a) / _f32(b))


def sqrt32(a: F32) -> F32:
    """Square root, float32, rounded once; sqrt(-0) is -0."""
    with np.errstate(all="ignore"):
        return canonical32(np.sqrt(_f32(a)))


def fma32(a: F32, b: F32, c: F32) -> F32:
    """a * b + c, float32, rounded once.

    The product is exact in float64. The sum is rounded there to odd (the neighbour with an odd
    pattern of the two around the exact sum), so that the rounding to float32 is the only one that
    shows: float64 has more than two bits to spare.

    Ref: Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008 (rounding to odd).
    """
    with np.errstate(all="ignore"):
        product = _f32(a).astype(np.float64) * _f32(b).astype(np.float64)
        addend = np.broadcast_to(_f32(c).astype(np.float64), product.shape)
        total = np.asarray(product + addend)
        back = total - product
        error = (product - (total - back)) + (addend - back)
        pattern = total.view(np.int64)
        inexact = (error != 0) & np.isfinite(total) & ((pattern & 1) == 0)
        towards = np.where((error > 0) == (total > 0), 1, -1)
        odd = np.where(inexact, pattern + towards, pattern).view(np.float64)
        return canonical32(odd.astype(np.float32))


def _f32(x: F32) -> F32:
    x = np.asarray(x)
    if x.dtype != np.float32:
        raise TypeError(f"operands must be float32, not {x.dtype}")
    return x
