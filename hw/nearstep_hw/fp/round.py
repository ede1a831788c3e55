"""The one place where results are rounded, packed and flagged; and the normalisation before it."""

from amaranth.hdl import Cat, Const, Mux, Value
from amaranth.lib import data

from nearstep_hw.fp.pipeline import Pipeline, Staged, Step
from nearstep_hw.fp.result import FpResult
from nearstep_hw.fp.shift import jam, leading_zeros, shift_left
from nearstep_spec.fp import FpFormat

__all__ = ["GUARD_BITS", "Special", "count_leading_zeros", "normalise", "round_pack", "special"]

FALSE = Const(0, 1)

GUARD_BITS = 3
"""Bits below the significand that rounding reads: guard, round, sticky."""


class Special(data.Struct):
    """What is known about a result without its arithmetic.

    One of `nan`, `infinite`, `zero` replaces the rounded number and its flags (`nan` before
    the others); `invalid` and `divide_by_zero` are the flags of such a result.
    """

    nan: 1
    infinite: 1
    zero: 1
    invalid: 1
    divide_by_zero: 1


def special(
    *,
    nan: Value,
    infinite: Value,
    invalid: Value,
    zero: Value = FALSE,
    divide_by_zero: Value = FALSE,
) -> Value:
    """Pack the members of a `Special`."""
    return Cat(nan, infinite, zero, invalid, divide_by_zero)


def count_leading_zeros(step: Step, frame: Value, exponent: Value) -> Value:
    """How far `frame` may be shifted up: to its leading one, but not below the least exponent.

    `exponent` (unsigned, biased, at least 1) is that of the top bit of `frame`. Zero may give
    any count.
    """
    top = Const(1 << (len(frame) - 1), len(frame))
    limit = step.signal("limit", (exponent - 1)[: len(exponent)])
    return leading_zeros(step, frame | (top >> limit))


def normalise(
    step: Step, fmt: FpFormat, frame: Value, exponent: Value, count: Value
) -> tuple[Value, Value]:
    """Shift `frame` up by `count`; return its exponent and the bits that rounding reads."""
    return (
        (exponent - count)[: len(exponent)],
        jam(step, shift_left(step, frame, count), fmt.precision + GUARD_BITS),
    )


def round_pack(
    step: Step,
    fmt: FpFormat,
    known: Value,
    sign: Value,
    exponent: Value,
    significand: Value,
    *,
    until: int,
    flags: bool,
) -> FpResult:
    """Round to nearest even, pack, and raise flags.

    *Numerics*: the number is `significand * 2**(exponent - bias - mantissa - 3)`. If the top bit of
    the significand is clear, the number is zero or below the normal range and `exponent` is that of
    the least normal number. Overflow gives infinity. Underflow is raised when a number that is tiny
    after rounding (rounded with an unbounded exponent, it is below the normal range) is inexact.

    Parameters
    ----------
    step : the step that rounds; all values are at its stage.
    known : a `Special`.
    sign : 1 bit.
    exponent : unsigned, biased.
    significand : `fmt.precision + 3` bits: hidden bit, fraction, guard, round, sticky.
    until : stage of the result, after that of `step`.
    flags : False leaves the flags out.

    Ref: IEEE 754-2019, 4.3.1, 7.4, 7.5.
    """
    case = data.View(Special, known)
    pipe: Pipeline = step.pipe
    sticky, half_below, guard = significand[0], significand[1], significand[2]
    fraction, normal = significand[GUARD_BITS:-1], significand[-1]

    truncated = Cat(fraction, Mux(normal, exponent, 0))
    up = guard & (half_below | sticky | fraction[0])
    magnitude = step.signal("magnitude", truncated + up)
    overflow = step.signal("overflow", magnitude[fmt.mantissa :] >= fmt.exponent_ones)

    number = Mux(overflow | case.infinite, fmt.infinity, magnitude[: fmt.width - 1])
    signed = Cat(Mux(case.zero, 0, number), sign)
    z = step.wrap("z", Mux(case.nan, fmt.quiet_nan, signed)[: fmt.width])
    raised: Staged | None = None
    if flags:
        inexact = guard | half_below | sticky | overflow
        becomes_normal = fraction.all() & guard & half_below
        underflow = inexact & ~normal & ~becomes_normal
        replaced = case.nan | case.infinite | case.zero
        arithmetic = Mux(replaced, 0, Cat(inexact, underflow, overflow))
        raised = step.wrap("flags", Cat(arithmetic, case.divide_by_zero, case.invalid))
        raised = pipe.delayed(raised, until)
    return FpResult(pipe.delayed(z, until), raised)
