"""Exact sums in integers of Python, from the standard: every number of binary32, binary16 and
bfloat16 is a whole number of 2**-149.

Ref: IEEE 754-2019, 4.3.1 (roundTiesToEven), 6.1 (infinities), 6.2 (NaN), 6.3 (signs of zeros).
"""

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache

from .arithmetic import CACHED, INFINITY, NAN, POINT, SIGN, decoded

FORMATS = {"fp32": (24, 127), "fp16": (11, 15), "bf16": (8, 127)}
"""Digits of a significand, and the greatest exponent."""


def nearest(value: Fraction, wire: str, negative: bool) -> int:
    """The pattern, in binary32, of the number of a format that is nearest to `value`; `negative` is
    the sign of a zero."""
    digits, most = FORMATS[wire]
    sign = SIGN if value < 0 or (value == 0 and negative) else 0
    size = abs(value)
    exponent = size.numerator.bit_length() - size.denominator.bit_length()
    if size < Fraction(2) ** exponent:
        exponent -= 1
    unit = max(exponent, 1 - most) - digits + 1  # of subnormals, the least
    units = round(size / Fraction(2) ** unit)  # of a Fraction: ties to even
    whole = units << unit + POINT
    if whole >= 1 << most + 1 + POINT:
        return sign | INFINITY
    length = whole.bit_length()
    if length < 24:
        return sign | whole  # a subnormal of binary32
    return sign | (length - 24 << 23) + (whole >> length - 24)


@lru_cache(CACHED)
def in_format(word: int, wire: str) -> int:
    """The pattern, in binary32, of a number of binary32 in a format."""
    number = decoded(word)
    if number.kind != "finite":
        return word
    return nearest(Fraction(number.units, 2**POINT), wire, number.negative)


def exact_sum(words: Sequence[int], wire: str = "fp32", divisor: int = 1) -> int:
    """The pattern of a sum of patterns of binary32, each rounded to `wire` first, divided by
    `divisor` and rounded once to `wire`."""
    patterns = [in_format(word, wire) for word in words]
    numbers = [decoded(pattern) for pattern in patterns]  # a large one has become infinite
    infinite = {number.negative for number in numbers if number.kind == "inf"}
    if any(number.kind == "nan" for number in numbers) or len(infinite) == 2:
        return NAN
    if infinite:
        return INFINITY | (SIGN if infinite == {True} else 0)
    total = sum(number.units for number in numbers)
    negative = all(pattern == SIGN for pattern in patterns)
    if total == 0:
        return SIGN if negative else 0
    return nearest(Fraction(total, divisor * 2**POINT), wire, total < 0)
