"""Floating point by exact rational numbers: slow, for any format, and written from the standard.

It shares nothing with `nearstep_sim.golden.fp`: a number is a `Fraction`, a result is rounded
by comparing with its two neighbours, and each flag is decided from its definition.

Ref: IEEE 754-2019, 4.3.1 (rounding), 7 (exceptions). Where the standard leaves a choice: a NaN
result is the positive quiet NaN of payload 0, tininess is detected after rounding, and 0 x inf +
NaN is invalid (the choices of Berkeley SoftFloat's RISC-V specialisation).
"""

from dataclasses import dataclass
from fractions import Fraction
from math import isqrt

from nearstep_spec.fp import FpFormat

INEXACT, UNDERFLOW, OVERFLOW, DIVIDE_BY_ZERO, INVALID = 1, 2, 4, 8, 16


@dataclass(frozen=True)
class Number:
    """A datum: `kind` is nan, snan, inf or finite; `value` counts for finite ones."""

    kind: str
    negative: bool
    value: Fraction = Fraction(0)

    @property
    def is_nan(self) -> bool:
        return self.kind in ("nan", "snan")

    @property
    def is_zero(self) -> bool:
        return self.kind == "finite" and self.value == 0


def decode(fmt: FpFormat, bits: int) -> Number:
    """The datum of a pattern."""
    negative = bool(bits >> (fmt.width - 1))
    field = (bits >> fmt.mantissa) & fmt.exponent_ones
    fraction = bits & ((1 << fmt.mantissa) - 1)
    if field == fmt.exponent_ones:
        if fraction == 0:
            return Number("inf", negative)
        return Number("nan" if fraction >> (fmt.mantissa - 1) else "snan", negative)
    significand = Fraction(fraction, 1 << fmt.mantissa) + (1 if field else 0)
    scale = Fraction(2) ** (max(field, 1) - fmt.bias)
    return Number("finite", negative, -significand * scale if negative else significand * scale)


def _exponent(value: Fraction) -> int:
    """The greatest e with 2**e <= value, for a positive value."""
    guess = value.numerator.bit_length() - value.denominator.bit_length()
    return guess if Fraction(2) ** guess <= value else guess - 1


def _neighbours(fmt: FpFormat, value: Fraction, emin: int | None) -> tuple[Fraction, Fraction]:
    """Multiples of the unit in the last place around a positive value; exponents above `emin`."""
    exponent = _exponent(value)
    if emin is not None:
        exponent = max(exponent, emin)
    ulp = Fraction(2) ** (exponent - fmt.mantissa)
    below = (value // ulp) * ulp
    return below, below if below == value else below + ulp


def _nearest(fmt: FpFormat, value: Fraction, emin: int | None) -> Fraction:
    below, above = _neighbours(fmt, value, emin)
    if value - below != above - value:
        return below if value - below < above - value else above
    if below == above:
        return below
    return below if (below / (above - below)) % 2 == 0 else above


def encode(fmt: FpFormat, negative: bool, value: Fraction) -> int:
    """The pattern of a number that the format has; `negative` is the sign of a zero."""
    sign = fmt.sign_bit if negative else 0
    value = abs(value)
    for_subnormal = Fraction(2) ** (fmt.emin - fmt.mantissa)
    if value < Fraction(2) ** fmt.emin:
        units = value / for_subnormal
        assert units.denominator == 1
        return sign | units.numerator
    exponent = _exponent(value)
    units = value / Fraction(2) ** (exponent - fmt.mantissa)
    assert units.denominator == 1
    return sign | ((exponent + fmt.bias) << fmt.mantissa) | (units.numerator - (1 << fmt.mantissa))


def rounded(fmt: FpFormat, value: Fraction, negative_zero: bool) -> tuple[int, int]:
    """Pattern and flags of an exact value; `negative_zero` is the sign if it is 0."""
    if value == 0:
        return (fmt.sign_bit if negative_zero else 0), 0
    negative = value < 0
    result = _nearest(fmt, abs(value), fmt.emin)
    unbounded = _nearest(fmt, abs(value), None)
    if unbounded > (2 - Fraction(1, 1 << fmt.mantissa)) * Fraction(2) ** fmt.emax:
        return fmt.infinity | (fmt.sign_bit if negative else 0), OVERFLOW | INEXACT
    flags = 0
    if result != abs(value):
        flags = INEXACT
        if unbounded < Fraction(2) ** fmt.emin:
            flags |= UNDERFLOW
    return encode(fmt, negative, result), flags


def _nan(fmt: FpFormat, operands: list[Number], invalid: bool) -> tuple[int, int]:
    invalid = invalid or any(x.kind == "snan" for x in operands)
    return fmt.quiet_nan, INVALID if invalid else 0


def _infinity(fmt: FpFormat, negative: bool, flags: int = 0) -> tuple[int, int]:
    return fmt.infinity | (fmt.sign_bit if negative else 0), flags


def add(fmt: FpFormat, a: int, b: int) -> tuple[int, int]:
    return _add(fmt, decode(fmt, a), decode(fmt, b))


def _add(fmt: FpFormat, x: Number, y: Number) -> tuple[int, int]:
    if x.is_nan or y.is_nan:
        return _nan(fmt, [x, y], False)
    if x.kind == "inf" and y.kind == "inf" and x.negative != y.negative:
        return _nan(fmt, [x, y], True)
    for number in (x, y):
        if number.kind == "inf":
            return _infinity(fmt, number.negative)
    return rounded(fmt, x.value + y.value, x.negative and y.negative and x.is_zero)


def sub(fmt: FpFormat, a: int, b: int) -> tuple[int, int]:
    return add(fmt, a, b ^ fmt.sign_bit)


def mul(fmt: FpFormat, a: int, b: int) -> tuple[int, int]:
    x, y = decode(fmt, a), decode(fmt, b)
    if x.is_nan or y.is_nan:
        return _nan(fmt, [x, y], False)
    negative = x.negative != y.negative
    if x.kind == "inf" or y.kind == "inf":
        if x.is_zero or y.is_zero:
            return _nan(fmt, [x, y], True)
        return _infinity(fmt, negative)
    return rounded(fmt, x.value * y.value, negative)


def fma(fmt: FpFormat, a: int, b: int, c: int) -> tuple[int, int]:
    x, y, z = decode(fmt, a), decode(fmt, b), decode(fmt, c)
    one_infinite = x.kind == "inf" or y.kind == "inf"
    if one_infinite and (x.is_zero or y.is_zero):
        return _nan(fmt, [x, y, z], True)
    if x.is_nan or y.is_nan or z.is_nan:
        return _nan(fmt, [x, y, z], False)
    negative = x.negative != y.negative
    if one_infinite:
        if z.kind == "inf" and z.negative != negative:
            return _nan(fmt, [x, y, z], True)
        return _infinity(fmt, negative)
    if z.kind == "inf":
        return _infinity(fmt, z.negative)
    product = x.value * y.value
    both_negative = negative and z.negative
    return rounded(fmt, product + z.value, both_negative and product == 0 and z.is_zero)


def div(fmt: FpFormat, a: int, b: int) -> tuple[int, int]:
    x, y = decode(fmt, a), decode(fmt, b)
    if x.is_nan or y.is_nan:
        return _nan(fmt, [x, y], False)
    negative = x.negative != y.negative
    if (x.kind == "inf" and y.kind == "inf") or (x.is_zero and y.is_zero):
        return _nan(fmt, [x, y], True)
    if x.kind == "inf":
        return _infinity(fmt, negative)
    if y.is_zero:
        return _infinity(fmt, negative, DIVIDE_BY_ZERO)
    if y.kind == "inf":
        return (fmt.sign_bit if negative else 0), 0
    return rounded(fmt, x.value / y.value, negative)


def sqrt(fmt: FpFormat, a: int) -> tuple[int, int]:
    x = decode(fmt, a)
    if x.is_nan:
        return _nan(fmt, [x], False)
    if x.is_zero:
        return a, 0
    if x.negative:
        return _nan(fmt, [x], True)
    if x.kind == "inf":
        return a, 0
    scale = 4 ** (2 * fmt.bias + 2 * fmt.precision)
    scaled = x.value * scale
    assert scaled.denominator == 1
    root = isqrt(scaled.numerator)
    exact = root * root == scaled.numerator
    # any number strictly between the integer root and the next one rounds the same way
    value = (Fraction(root) if exact else root + Fraction(1, 2)) / isqrt(scale)
    return rounded(fmt, value, False)


def convert(source: FpFormat, target: FpFormat, a: int) -> tuple[int, int]:
    x = decode(source, a)
    if x.is_nan:
        return _nan(target, [x], False)
    if x.kind == "inf":
        return _infinity(target, x.negative)
    return rounded(target, x.value, x.negative)
