"""Normalisation, rounding, packing and flags of all operations."""

from collections.abc import Sequence

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
    """Special cases of a result, decided from the operands' classes.

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


def count_leading_zeros(steps: Sequence[Step], frame: Staged, limit: Staged) -> Staged:
    """Return how far `frame` may be shifted up: to its leading one, at most `limit`.

    The count of a zero frame is arbitrary.
    """
    mark, *count = steps
    width = len(frame.value)
    top = Const(1 << (width - 1), width)
    limited = mark.wrap("limited", mark(frame) | (top >> mark(limit)))
    return leading_zeros(count, limited)


def normalise(
    steps: Sequence[Step], fmt: FpFormat, frame: Staged, exponent: Staged, count: Staged
) -> tuple[Staged, Staged]:
    """Shift `frame` up by `count`; return its exponent and the bits that rounding reads."""
    last = steps[-1]
    raised = shift_left(steps, frame, count)
    return (
        last.wrap("exponent", (last(exponent) - last(count))[: len(exponent.value)]),
        last.wrap("significand", jam(last, last(raised), fmt.precision + GUARD_BITS)),
    )


def round_pack(
    steps: Sequence[Step],
    fmt: FpFormat,
    known: Staged,
    sign: Staged,
    exponent: Staged,
    significand: Staged,
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
    steps : rounding decision, increment, packing.
    known : a `Special`.
    sign : 1 bit.
    exponent : unsigned, biased.
    significand : `fmt.precision + 3` bits: hidden bit, fraction, guard, round, sticky.
    until : stage of the result, after that of the last step.
    flags : False leaves the flags out.

    Ref: IEEE 754-2019, 4.3.1, 7.4, 7.5.
    """
    way, increment, pack = steps
    pipe: Pipeline = pack.pipe
    bits = way(significand)
    sticky, half_below, guard = bits[0], bits[1], bits[2]
    fraction, normal = bits[GUARD_BITS:-1], bits[-1]

    truncated = way.wrap("truncated", Cat(fraction, Mux(normal, way(exponent), 0)))
    up = way.wrap("up", guard & (half_below | sticky | fraction[0]))
    rounded = increment.wrap("magnitude", increment(truncated) + increment(up))
    case = data.View(Special, pack(known))
    magnitude = pack(rounded)
    overflow = pack.signal("overflow", magnitude[fmt.mantissa :] >= fmt.exponent_ones)

    number = Mux(overflow | case.infinite, fmt.infinity, magnitude[: fmt.width - 1])
    signed = Cat(Mux(case.zero, 0, number), pack(sign))
    z = pack.wrap("z", Mux(case.nan, fmt.quiet_nan, signed)[: fmt.width])
    raised: Staged | None = None
    if flags:
        becomes_normal = fraction.all() & guard & half_below
        inexact = way.wrap("inexact", guard | half_below | sticky)
        tiny = way.wrap("tiny", inexact.value & ~normal & ~becomes_normal)
        replaced = case.nan | case.infinite | case.zero
        arithmetic = Cat(pack(inexact) | overflow, pack(tiny), overflow)
        arithmetic = Mux(replaced, 0, arithmetic)
        raised = pack.wrap("flags", Cat(arithmetic, case.divide_by_zero, case.invalid))
        raised = pipe.delayed(raised, until)
    return FpResult(pipe.delayed(z, until), raised)
