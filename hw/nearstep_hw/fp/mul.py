"""Multiplication."""

from amaranth.hdl import Mux

from nearstep_hw.fp.multiply import product
from nearstep_hw.fp.operand import unpack
from nearstep_hw.fp.pipeline import Pipeline, Staged
from nearstep_hw.fp.result import FpResult
from nearstep_hw.fp.round import GUARD_BITS, count_leading_zeros, normalise, round_pack, special
from nearstep_hw.fp.shift import clip, jam, shift_right_jam
from nearstep_spec.fp import FpFormat

__all__ = ["DEPTH", "mul"]

_COSTS = (1, 0.8, 1, 1, 0.8)
DEPTH = len(_COSTS)
"""Latency in cycles, unless asked otherwise."""


def mul(
    pipe: Pipeline,
    fmt: FpFormat,
    a: Staged,
    b: Staged,
    *,
    depth: int = DEPTH,
    flags: bool = True,
) -> FpResult:
    """a * b, rounded once.

    Subnormal operands are multiplied as they are; the product is then shifted up to its leading
    one, or down to the least exponent.

    *Timing*: latency `depth`, one operation a cycle. Steps: partial products, their sum, count
    leading zeros, shift, round.

    *Resources*: two DSP48E2 for binary32.
    """
    start = pipe.latest(a, b)
    multiply, total, count, shift, final = pipe.steps(start, _COSTS, depth)

    x, y = unpack(fmt, multiply(a)), unpack(fmt, multiply(b))
    exact = product(multiply, total, fmt, x, y)
    sign = multiply.wrap("sign", exact.sign)
    exponent = multiply.wrap("product_exponent", exact.exponent)
    undefined = (x.infinite & y.zero) | (x.zero & y.infinite)
    known = multiply.wrap(
        "known",
        special(
            nan=x.nan | y.nan | undefined,
            infinite=x.infinite | y.infinite,
            invalid=x.signalling | y.signalling | undefined,
        ),
    )

    width = 2 * fmt.precision
    exponent = total(exponent)
    below = total.wrap("below", exponent < 1)
    top = total.wrap("top", Mux(exponent < 1, 1, exponent)[: fmt.exponent + 1])
    down = total.wrap("down", clip(total, (1 - exponent)[: fmt.exponent + 1], width))

    zeros = count.wrap("zeros", count_leading_zeros(count, count(exact.significand), count(top)))

    frame = shift(exact.significand)
    exponent, raised = normalise(shift, fmt, frame, shift(top), shift(zeros))
    lowered = jam(shift, shift_right_jam(shift, frame, shift(down)), fmt.precision + GUARD_BITS)
    exponent = shift.wrap("exponent", Mux(shift(below), 1, exponent))
    significand = shift.wrap("significand", Mux(shift(below), lowered, raised))

    return round_pack(
        final,
        fmt,
        known=final(known),
        sign=final(sign),
        exponent=final(exponent),
        significand=final(significand),
        until=start + depth,
        flags=flags,
    )
