"""binary32 in two ways that share nothing with the models of hardware: exact numbers, each result
rounded once; and what numpy computes in float32.

Every number of binary32 is a whole number of its least one, 2**-149: exact ones are integers of
Python, and their rounding is held to that of fractions (`tests.sim.golden.exact`) by a test.

`tests/oracle/formulas.py` is written for either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

NAN = 0x7FC0_0000
"""What every operation gives that has no other result."""
INFINITY, SIGN = 0x7F80_0000, 0x8000_0000
DIGITS = 24  # of a significand
POINT = 149  # the least number is 2**-POINT
DEEP = 400
"""Bits behind the point of quotients and roots that are not exact: what is left tells which side of
a tie they are on, and the least quotient has 123 bits of them."""

CACHED = 1 << 18
"""Results of exact operations that are kept: specials meet again and again."""


class Number(NamedTuple):
    """What a pattern means: `units` of 2**-149 if it is finite."""

    kind: str
    negative: bool
    units: int = 0


@lru_cache(CACHED)
def decoded(bits: int) -> Number:
    """The number of a pattern: `kind` is nan, inf or finite."""
    negative = bool(bits & SIGN)
    field, fraction = bits >> 23 & 0xFF, bits & 0x7F_FFFF
    if field == 0xFF:
        return Number("nan" if fraction else "inf", negative)
    units = fraction if field == 0 else (fraction | 1 << 23) << field - 1
    return Number("finite", negative, -units if negative else units)


def rounded(units: int, point: int, negative: bool = False) -> int:
    """The pattern of `units` of 2**-point, to nearest even; `negative` is the sign of a zero."""
    if units == 0:
        return SIGN if negative else 0
    sign, units = (SIGN, -units) if units < 0 else (0, units)
    dropped = max(units.bit_length() - DIGITS, point - POINT)
    if dropped > 0:
        kept, rest, half = units >> dropped, units & ((1 << dropped) - 1), 1 << dropped - 1
        kept += rest > half or (rest == half and kept & 1)
    else:
        kept = units << -dropped
    # the leading digit of a normal number, and a carry, count in the exponent
    return sign | min((dropped - point + POINT << 23) + kept, INFINITY)


def _inf(negative: bool) -> int:
    return SIGN | INFINITY if negative else INFINITY


@lru_cache(CACHED)
def add(a: int, b: int) -> int:
    x, y = decoded(a), decoded(b)
    if x.kind == y.kind == "finite":
        return rounded(x.units + y.units, POINT, x.negative and y.negative)
    if "nan" in (x.kind, y.kind) or (x.kind == y.kind and x.negative != y.negative):
        return NAN
    return a if x.kind == "inf" else b


@lru_cache(CACHED)
def mul(a: int, b: int) -> int:
    x, y = decoded(a), decoded(b)
    negative = x.negative != y.negative
    if x.kind == y.kind == "finite":
        return rounded(x.units * y.units, 2 * POINT, negative)
    return NAN if _no_product(x, y) else _inf(negative)


def _no_product(x: Number, y: Number) -> bool:
    """NaN, or infinity times zero."""
    zero = any(each.kind == "finite" and each.units == 0 for each in (x, y))
    return "nan" in (x.kind, y.kind) or ("inf" in (x.kind, y.kind) and zero)


@lru_cache(CACHED)
def fma(a: int, b: int, c: int) -> int:
    x, y, z = decoded(a), decoded(b), decoded(c)
    negative = x.negative != y.negative
    if x.kind == y.kind == z.kind == "finite":
        units = x.units * y.units + (z.units << POINT)
        # the sum of numbers that cancel is +0
        return rounded(units, 2 * POINT, negative and z.negative and not z.units)
    if z.kind == "nan" or _no_product(x, y):
        return NAN
    if "inf" not in (x.kind, y.kind):
        return c
    return NAN if z.kind == "inf" and z.negative != negative else _inf(negative)


@lru_cache(CACHED)
def div(a: int, b: int) -> int:
    x, y = decoded(a), decoded(b)
    negative = x.negative != y.negative
    if "nan" in (x.kind, y.kind) or x.kind == y.kind == "inf":
        return NAN
    if x.kind == "inf":
        return _inf(negative)
    if y.kind == "inf":
        return rounded(0, 0, negative)
    if y.units == 0:
        return NAN if x.units == 0 else _inf(negative)
    quotient, rest = divmod(abs(x.units) << DEEP, abs(y.units))
    units = 2 * quotient + (rest != 0)
    return rounded(-units if negative else units, DEEP + 1, negative)


@lru_cache(CACHED)
def sqrt(a: int) -> int:
    x = decoded(a)
    if x.kind == "nan" or (x.negative and (x.kind == "inf" or x.units)):
        return NAN
    if x.kind == "inf" or x.units == 0:
        return a
    square = x.units << 2 * DEEP - POINT
    root = math.isqrt(square)
    return rounded(2 * root + (root * root != square), DEEP + 1)


@dataclass(frozen=True, slots=True)
class Exact:
    """A number of binary32, by its pattern."""

    bits: int

    def __add__(self, other: Exact) -> Exact:
        return Exact(add(self.bits, other.bits))

    def __sub__(self, other: Exact) -> Exact:
        return Exact(add(self.bits, other.bits ^ SIGN))

    def __mul__(self, other: Exact) -> Exact:
        return Exact(mul(self.bits, other.bits))

    def __truediv__(self, other: Exact) -> Exact:
        return Exact(div(self.bits, other.bits))

    def __float__(self) -> float:
        number = decoded(self.bits)
        assert number.kind == "finite"
        return math.ldexp(number.units, -POINT)

    @staticmethod
    def number(value: float) -> Exact:
        """A number of the host, rounded once."""
        units, of = value.as_integer_ratio()
        return Exact(rounded(units, of.bit_length() - 1, math.copysign(1, value) < 0))

    @staticmethod
    def fma(a: Exact, b: Exact, c: Exact) -> Exact:
        """a b + c, rounded once."""
        return Exact(fma(a.bits, b.bits, c.bits))

    @staticmethod
    def sqrt(a: Exact) -> Exact:
        return Exact(sqrt(a.bits))

    @staticmethod
    def larger(a: Exact, b: Exact) -> Exact:
        """The larger one; of equal ones, two zeros included, `b`; NaN if either is."""
        one, other = decoded(a.bits), decoded(b.bits)
        if "nan" in (one.kind, other.kind):
            return Exact(NAN)
        return a if _order(one) > _order(other) else b


def _order(number: Number) -> tuple[int, int]:
    sign = -1 if number.negative else 1
    return (sign, 0) if number.kind == "inf" else (0, number.units)


def _canonical(values: NDArray[np.float32]) -> Plain:
    bits = values.view(np.uint32).copy()
    bits[np.isnan(values)] = NAN
    return Plain(bits.view(np.float32))


@dataclass(frozen=True, eq=False)
class Plain:
    """Numbers of binary32 in an array of numpy, or one for all elements."""

    values: NDArray[np.float32]

    def __add__(self, other: Plain) -> Plain:
        return _computed(np.add, self, other)

    def __sub__(self, other: Plain) -> Plain:
        return _computed(np.subtract, self, other)

    def __mul__(self, other: Plain) -> Plain:
        return _computed(np.multiply, self, other)

    def __truediv__(self, other: Plain) -> Plain:
        return _computed(np.divide, self, other)

    def __float__(self) -> float:
        return float(self.values[0])

    @staticmethod
    def number(value: float) -> Plain:
        """A number of the host, rounded once."""
        with np.errstate(all="ignore"):
            return Plain(np.array([value], np.float64).astype(np.float32))

    @staticmethod
    def fma(a: Plain, b: Plain, c: Plain) -> Plain:
        """a b + c, rounded once: the product is exact in binary64, the sum is rounded to odd there,
        and what is left is one rounding.

        Ref: Boldo and Melquiond, Emulation of FMA and correctly rounded sums: proved algorithms
        using rounding to odd.
        """
        with np.errstate(all="ignore"):
            product = a.values.astype(np.float64) * b.values.astype(np.float64)
            addend = np.broadcast_to(c.values.astype(np.float64), product.shape)
            total = product + addend
            rest = total - product
            error = (product - (total - rest)) + (addend - rest)
            bits = total.view(np.int64).copy()
            even = np.isfinite(total) & (error != 0) & (bits % 2 == 0)
            bits[even] += np.where((error > 0) == (total > 0), 1, -1)[even]
            return _canonical(bits.view(np.float64).astype(np.float32))

    @staticmethod
    def sqrt(a: Plain) -> Plain:
        return _computed(np.sqrt, a)

    @staticmethod
    def larger(a: Plain, b: Plain) -> Plain:
        """The larger one; of equal ones, two zeros included, `b`; NaN if either is."""
        unordered = np.isnan(a.values) | np.isnan(b.values)
        chosen = np.where(a.values > b.values, a.values, b.values)
        return Plain(np.where(unordered, np.uint32(NAN).view(np.float32), chosen))


def _computed(operation: Callable[..., Any], *operands: Plain) -> Plain:
    with np.errstate(all="ignore"):
        found = operation(*(each.values for each in operands))
    assert found.dtype == np.float32
    return _canonical(found)
