"""binary32 in two ways that share nothing with the models of hardware: exact numbers, each result
rounded once by comparing it with its neighbours; and what numpy computes in float32.

`tests/oracle/formulas.py` is written for either.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_spec.fp import FP32

from ..sim.golden import exact

NAN = 0x7FC0_0000
"""What every operation gives that has no other result."""

CACHED = 1 << 20
"""Results of exact operations that are kept: specials meet again and again."""


@lru_cache(CACHED)
def _exactly(operation: Callable[..., tuple[int, int]], *operands: int) -> int:
    return operation(FP32, *operands)[0]


@dataclass(frozen=True)
class Exact:
    """A number of binary32, by its pattern."""

    bits: int

    def __add__(self, other: Exact) -> Exact:
        return Exact(_exactly(exact.add, self.bits, other.bits))

    def __sub__(self, other: Exact) -> Exact:
        return Exact(_exactly(exact.sub, self.bits, other.bits))

    def __mul__(self, other: Exact) -> Exact:
        return Exact(_exactly(exact.mul, self.bits, other.bits))

    def __truediv__(self, other: Exact) -> Exact:
        return Exact(_exactly(exact.div, self.bits, other.bits))

    def __float__(self) -> float:
        return float(exact.decode(FP32, self.bits).value)

    @staticmethod
    def number(value: float) -> Exact:
        """A number of the host, rounded once."""
        negative = math.copysign(1, value) < 0
        return Exact(exact.rounded(FP32, Fraction(value), negative)[0])

    @staticmethod
    def fma(a: Exact, b: Exact, c: Exact) -> Exact:
        """a b + c, rounded once."""
        return Exact(_exactly(exact.fma, a.bits, b.bits, c.bits))

    @staticmethod
    def sqrt(a: Exact) -> Exact:
        return Exact(_exactly(exact.sqrt, a.bits))

    @staticmethod
    def larger(a: Exact, b: Exact) -> Exact:
        """The larger one; of equal ones, two zeros included, `b`; NaN if either is."""
        one, other = (exact.decode(FP32, each.bits) for each in (a, b))
        if one.is_nan or other.is_nan:
            return Exact(NAN)
        return a if _order(one) > _order(other) else b


def _order(number: exact.Number) -> tuple[int, Fraction]:
    sign = -1 if number.negative else 1
    return (sign, Fraction(0)) if number.kind == "inf" else (0, number.value)


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
