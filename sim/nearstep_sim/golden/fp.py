"""Floating point, bit-exact: every operation on patterns with flags, and binary32 values alone.

Two layers. `add sub mul fma div sqrt convert` take bit patterns of any format of up to 32 bits
and return patterns and exception flags; they are integer arithmetic throughout. `add32 ... fma32`
take and return `float32` arrays, without flags, at the speed of numpy; `widen32` gives such
arrays, and `narrow32` takes them.

Every result is rounded once, to nearest, ties to even. A NaN result is the default quiet NaN.
Flags: inexact 1, underflow 2 (tiny after rounding, and inexact), overflow 4, divide by zero 8,
invalid 16 (also for a signalling NaN operand, and for 0 x inf + NaN).

Ref: IEEE 754-2019, 4.3.1, 6.2, 7.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearstep_spec.fp import BF16, FLAG_NAMES, FP16, FP32, FormatError, FpFormat

__all__ = [
    "DIVIDE_BY_ZERO",
    "INEXACT",
    "INVALID",
    "OVERFLOW",
    "UNDERFLOW",
    "add",
    "add32",
    "canonical32",
    "convert",
    "div",
    "div32",
    "fma",
    "fma32",
    "mul",
    "mul32",
    "narrow32",
    "sqrt",
    "sqrt32",
    "sub",
    "sub32",
    "widen32",
]

INEXACT, UNDERFLOW, OVERFLOW, DIVIDE_BY_ZERO, INVALID = (1 << k for k in range(len(FLAG_NAMES)))

Bits = NDArray[np.unsignedinteger]
Flags = NDArray[np.uint8]
Bool = NDArray[np.bool_]
F32 = NDArray[np.float32]

QUIET_NAN32 = np.uint32(0x7FC00000).view(np.float32)


def canonical32(x: F32) -> F32:
    """`x` with every NaN replaced by the default quiet NaN 0x7FC00000."""
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


def widen32(a: NDArray[np.uint16], source: FpFormat) -> F32:
    """Patterns of FP16 or BF16 as float32, exactly; a NaN is the default quiet NaN."""
    if a.dtype != np.uint16 or source not in (FP16, BF16):
        raise TypeError(f"operands must be uint16 of FP16 or BF16, not {a.dtype} of {source}")
    if source == BF16:
        return canonical32((a.astype(np.uint32) << np.uint32(16)).view(np.float32))
    with np.errstate(all="ignore"):
        return canonical32(a.view(np.float16).astype(np.float32))


def narrow32(a: F32, target: FpFormat) -> NDArray[np.uint16]:
    """float32 as patterns of FP16 or BF16, rounded once; a NaN is the default quiet NaN."""
    a = _f32(a)
    if target == FP16:
        with np.errstate(all="ignore"):
            bits = a.astype(np.float16).view(np.uint16)
    elif target == BF16:
        words = a.view(np.uint32)
        odd = (words >> np.uint32(16)) & np.uint32(1)
        bits = ((words + (np.uint32(0x7FFF) + odd)) >> np.uint32(16)).astype(np.uint16)
    else:
        raise TypeError(f"target must be FP16 or BF16, not {target}")
    return np.where(np.isnan(a), np.uint16(target.quiet_nan), bits)


def _f32(x: F32) -> F32:
    x = np.asarray(x)
    if x.dtype != np.float32:
        raise TypeError(f"operands must be float32, not {x.dtype}")
    return x


@dataclass(frozen=True)
class _Decoded:
    """Operands taken apart: finite value = (-1)**sign * significand * 2**exponent.

    The significand of a number other than zero has `fmt.precision` bits, subnormal or not.
    """

    sign: Bool
    exponent: NDArray[np.int64]
    significand: NDArray[np.uint64]
    zero: Bool
    infinite: Bool
    nan: Bool
    signalling: Bool


def _decode(bits: Bits, fmt: FpFormat) -> _Decoded:
    x = np.asarray(bits)
    if x.dtype.kind != "u":
        raise TypeError(f"operands must be unsigned bit patterns, not {x.dtype}")
    x = x.astype(np.uint64)
    fraction = x & np.uint64(fmt.min_normal - 1)
    field = ((x >> np.uint64(fmt.mantissa)) & np.uint64(fmt.exponent_ones)).astype(np.int64)
    special = field == fmt.exponent_ones
    subnormal = field == 0
    significand = np.where(subnormal, fraction, fraction | np.uint64(fmt.min_normal))
    lift = np.where(significand == 0, 0, fmt.precision - _bit_length(significand))
    nan = special & (fraction != 0)
    return _Decoded(
        sign=((x >> np.uint64(fmt.width - 1)) & np.uint64(1)) != 0,
        exponent=np.maximum(field, 1) - fmt.bias - fmt.mantissa - lift,
        significand=significand << lift.astype(np.uint64),
        zero=(x & np.uint64(fmt.sign_bit - 1)) == 0,
        infinite=special & (fraction == 0),
        nan=nan,
        signalling=nan & ((fraction >> np.uint64(fmt.mantissa - 1)) == 0),
    )


def _bit_length(x: NDArray[np.uint64]) -> NDArray[np.int64]:
    """Position above the highest set bit; 0 for zero."""
    length = np.zeros(x.shape, dtype=np.int64)
    for step in (32, 16, 8, 4, 2, 1):
        high = (x >> np.uint64(step)) != 0
        length += np.where(high, step, 0)
        x = np.where(high, x >> np.uint64(step), x)
    return length + (x != 0)


def _shift_right_jam(x: NDArray[np.uint64], amount: NDArray[np.int64]) -> NDArray[np.uint64]:
    """x >> amount (0 or more); the lowest bit also tells whether a set bit was lost."""
    amount = np.minimum(amount, 63).astype(np.uint64)
    kept = x >> amount
    return kept | ((kept << amount) != x).astype(np.uint64)


def _nearest_even(
    x: NDArray[np.uint64], drop: NDArray[np.int64]
) -> tuple[NDArray[np.uint64], Bool]:
    """x / 2**drop to the nearest integer, ties to even, and whether that is inexact."""
    x = _shift_right_jam(x, np.maximum(drop - 2, 0))
    left = np.clip(drop, 0, 2).astype(np.uint64)
    kept = x >> left
    rest = x - (kept << left)
    half = (np.uint64(1) << left) >> np.uint64(1)
    up = (rest > half) | ((rest == half) & (rest != 0) & ((kept & np.uint64(1)) != 0))
    return (kept + up) << np.maximum(-drop, 0).astype(np.uint64), rest != 0


def _round(
    fmt: FpFormat,
    sign: Bool,
    exponent: NDArray[np.int64],
    significand: NDArray[np.uint64],
    *,
    nan: Bool,
    infinite: Bool,
    invalid: Bool,
    zero: Bool | None = None,
    divide_by_zero: Bool | None = None,
) -> tuple[Bits, Flags]:
    """Pattern and flags of (-1)**sign * significand * 2**exponent, where no special case holds.

    `significand` may hold a sticky bit at least two bits below the precision of the result.
    """
    if zero is not None:
        significand = np.where(zero, np.uint64(0), significand)
    leading = exponent + _bit_length(significand) - 1
    lowest = np.maximum(leading, fmt.emin) - fmt.mantissa
    rounded, inexact = _nearest_even(significand, np.clip(lowest - exponent, -63, 80))
    unbounded, _ = _nearest_even(significand, np.clip(leading - fmt.mantissa - exponent, -63, 80))
    grows = (leading == fmt.emin - 1) & (unbounded == np.uint64(2 << fmt.mantissa))
    tiny = (leading < fmt.emin) & ~grows
    biased = np.maximum(leading, fmt.emin) + fmt.bias
    base = ((biased - 1) << fmt.mantissa).astype(np.uint64)
    magnitude = np.where(rounded == 0, np.uint64(0), base + rounded)
    overflow = (rounded != 0) & ((magnitude >> np.uint64(fmt.mantissa)) >= fmt.exponent_ones)

    replaced = nan | infinite
    flags = np.where(inexact | overflow, INEXACT, 0)
    flags |= np.where(inexact & tiny, UNDERFLOW, 0)
    flags |= np.where(overflow, OVERFLOW, 0)
    flags = np.where(replaced, 0, flags)
    if divide_by_zero is not None:
        flags |= np.where(divide_by_zero, DIVIDE_BY_ZERO, 0)
    flags |= np.where(invalid, INVALID, 0)

    magnitude = np.where(overflow | infinite, np.uint64(fmt.infinity), magnitude)
    pattern = magnitude | np.where(sign, np.uint64(fmt.sign_bit), np.uint64(0))
    pattern = np.where(nan, np.uint64(fmt.quiet_nan), pattern)
    return pattern.astype(_dtype(fmt)), flags.astype(np.uint8)


def _dtype(fmt: FpFormat) -> type[np.unsignedinteger]:
    if fmt.width > 32:
        raise FormatError(f"golden models reach to 32 bits, not {fmt.width}")
    return np.uint32 if fmt.width > 16 else np.uint16


def add(a: Bits, b: Bits, fmt: FpFormat = FP32) -> tuple[Bits, Flags]:
    """a + b: patterns in, pattern and flags out."""
    x, y = _decode(a, fmt), _decode(b, fmt)
    exponent, significand, sign = _sum(
        (x.sign, x.exponent, x.significand), (y.sign, y.exponent, y.significand), fmt.precision
    )
    cancel = x.infinite & y.infinite & (x.sign ^ y.sign)
    return _round(
        fmt,
        np.where(x.infinite, x.sign, np.where(y.infinite, y.sign, sign)),
        exponent,
        significand,
        nan=x.nan | y.nan | cancel,
        infinite=x.infinite | y.infinite,
        invalid=x.signalling | y.signalling | cancel,
    )


def sub(a: Bits, b: Bits, fmt: FpFormat = FP32) -> tuple[Bits, Flags]:
    """a - b: patterns in, pattern and flags out."""
    return add(a, np.bitwise_xor(b, np.asarray(b).dtype.type(fmt.sign_bit)), fmt)


def mul(a: Bits, b: Bits, fmt: FpFormat = FP32) -> tuple[Bits, Flags]:
    """a * b: patterns in, pattern and flags out."""
    x, y = _decode(a, fmt), _decode(b, fmt)
    undefined = (x.infinite & y.zero) | (x.zero & y.infinite)
    return _round(
        fmt,
        x.sign ^ y.sign,
        x.exponent + y.exponent,
        x.significand * y.significand,
        nan=x.nan | y.nan | undefined,
        infinite=x.infinite | y.infinite,
        invalid=x.signalling | y.signalling | undefined,
    )


def fma(a: Bits, b: Bits, c: Bits, fmt: FpFormat = FP32) -> tuple[Bits, Flags]:
    """a * b + c, rounded once: patterns in, pattern and flags out."""
    x, y, z = _decode(a, fmt), _decode(b, fmt), _decode(c, fmt)
    product_sign = x.sign ^ y.sign
    exponent, significand, sign = _sum(
        (product_sign, x.exponent + y.exponent, x.significand * y.significand),
        (z.sign, z.exponent, z.significand),
        2 * fmt.precision,
    )
    infinite = (x.infinite & ~y.nan) | (y.infinite & ~x.nan)
    undefined = (x.infinite & y.zero) | (x.zero & y.infinite)
    invalid = undefined | (infinite & z.infinite & (product_sign ^ z.sign))
    return _round(
        fmt,
        np.where(infinite, product_sign, np.where(z.infinite, z.sign, sign)),
        exponent,
        significand,
        nan=x.nan | y.nan | z.nan | invalid,
        infinite=infinite | z.infinite,
        invalid=x.signalling | y.signalling | z.signalling | invalid,
    )


def div(a: Bits, b: Bits, fmt: FpFormat = FP32) -> tuple[Bits, Flags]:
    """a / b: patterns in, pattern and flags out."""
    x, y = _decode(a, fmt), _decode(b, fmt)
    extra = fmt.precision + 3
    dividend = x.significand << np.uint64(extra)
    divisor = np.where(y.significand == 0, np.uint64(1), y.significand)
    quotient = dividend // divisor
    quotient |= (quotient * divisor != dividend).astype(np.uint64)
    undefined = (x.zero & y.zero) | (x.infinite & y.infinite)
    nan = x.nan | y.nan | undefined
    return _round(
        fmt,
        x.sign ^ y.sign,
        x.exponent - y.exponent - extra,
        quotient,
        nan=nan,
        infinite=(x.infinite | y.zero) & ~nan,
        zero=x.zero | y.infinite,
        invalid=x.signalling | y.signalling | undefined,
        divide_by_zero=y.zero & ~x.infinite & ~nan,
    )


def sqrt(a: Bits, fmt: FpFormat = FP32) -> tuple[Bits, Flags]:
    """Square root of a: pattern in, pattern and flags out."""
    x = _decode(a, fmt)
    negative = x.sign & ~x.zero & ~x.nan
    extra = fmt.precision + 6
    extra += (x.exponent + extra) & 1
    radicand = x.significand << extra.astype(np.uint64)
    root = np.sqrt(radicand.astype(np.float64)).astype(np.uint64)
    root -= (root * root > radicand).astype(np.uint64)
    root += ((root + np.uint64(1)) * (root + np.uint64(1)) <= radicand).astype(np.uint64)
    root = (root << np.uint64(1)) | (root * root != radicand).astype(np.uint64)
    return _round(
        fmt,
        x.sign,
        (x.exponent - extra) // 2 - 1,
        root,
        nan=x.nan | negative,
        infinite=x.infinite,
        zero=x.zero,
        invalid=x.signalling | negative,
    )


def convert(a: Bits, source: FpFormat, target: FpFormat) -> tuple[Bits, Flags]:
    """a, of format `source`, in format `target`: pattern in, pattern and flags out."""
    x = _decode(a, source)
    return _round(
        target,
        x.sign,
        x.exponent,
        x.significand,
        nan=x.nan,
        infinite=x.infinite,
        invalid=x.signalling,
    )


_Term = tuple[Bool, NDArray[np.int64], NDArray[np.uint64]]


def _sum(x: _Term, y: _Term, width: int) -> tuple[NDArray[np.int64], NDArray[np.uint64], Bool]:
    """Exponent, significand (with a sticky bit) and sign of the sum of two signed terms.

    The significands have at most `width` bits, and `width` is at most 48. The term with the
    higher leading bit is put just below bit 62, so that at least 13 bits are kept below it.
    """
    lead_x, lead_y = (np.where(s == 0, -(1 << 20), e + _bit_length(s)) for _, e, s in (x, y))
    swap = (lead_y > lead_x) | ((lead_y == lead_x) & (y[1] > x[1]))
    sign_u, exponent_u, u, lead = (
        np.where(swap, q, p) for p, q in zip((*x, lead_x), (*y, lead_y), strict=True)
    )
    sign_v, exponent_v, v = (np.where(swap, p, q) for p, q in zip(x, y, strict=True))
    base = np.where(u == 0, 0, lead - 62)
    u = u << np.maximum(exponent_u - base, 0).astype(np.uint64)
    u = np.where(u == 0, np.uint64(0), u)
    move = np.where(v == 0, 0, exponent_v - base)
    v = v << np.maximum(move, 0).astype(np.uint64)
    v = _shift_right_jam(v, np.maximum(-move, 0))
    unlike = sign_u ^ sign_v
    negative = unlike & (v > u)
    total = np.where(unlike, np.where(negative, v - u, u - v), u + v)
    sign = np.where(negative, sign_v, sign_u) & ~(unlike & (total == 0))
    return base, total, sign
