"""Multiplication."""

from amaranth.hdl import Mux

from nearstep_hw.fp.multiply import product
from nearstep_hw.fp.operand import unpack
from nearstep_hw.fp.pipeline import Parts, Pipeline, Staged
from nearstep_hw.fp.result import FpResult
from nearstep_hw.fp.round import GUARD_BITS, count_leading_zeros, normalise, round_pack, special
from nearstep_hw.fp.shift import clip, jam, shift_right_jam
from nearstep_spec.fp import FpFormat

__all__ = ["DEPTH", "mul"]

_COSTS = (
    Parts(1, (3, 6)),
    Parts(0.8, (4, 5)),
    Parts(1, (3, 4, 5, 5)),
    Parts(1, (3, 5)),
    Parts(0.8, (2, 4, 5)),
)
DEPTH = len(_COSTS)
"""Default latency in cycles."""


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

    Subnormal operands are not normalised; the product is shifted up to its leading one, or down to
    the least exponent.

    *Timing*: latency `depth`, one operation a cycle. Steps: partial products, their sum, count
    leading zeros, shift, round.

    *Resources*: two DSP48E2 for binary32.
    """
    start = pipe.latest(a, b)
    multiply, total, count, shift, final = pipe.steps(start, _COSTS, depth)
    at = multiply[0]

    x, y = unpack(fmt, at(a)), unpack(fmt, at(b))
    exact = product((*multiply, *total), fmt, x, y)
    sign = at.wrap("sign", exact.sign)
    exponent = at.wrap("product_exponent", exact.exponent)
    undefined = (x.infinite & y.zero) | (x.zero & y.infinite)
    known = at.wrap(
        "known",
        special(
            nan=x.nan | y.nan | undefined,
            infinite=x.infinite | y.infinite,
            invalid=x.signalling | y.signalling | undefined,
        ),
    )

    width = 2 * fmt.precision
    bound, clipped = total
    exponent = bound(exponent)
    below = bound.wrap("below", exponent < 1)
    limit = bound.wrap("limit", Mux(below.value, 0, exponent - 1)[: fmt.exponent + 1])
    top = bound.wrap("top", Mux(below.value, 1, exponent)[: fmt.exponent + 1])
    distance = bound.wrap("distance", (1 - exponent)[: fmt.exponent + 1])
    down = clipped.wrap("down", clip(clipped, clipped(distance), width))

    zeros = count_leading_zeros(count, exact.significand, limit)

    last = shift[-1]
    exponent, raised = normalise(shift, fmt, exact.significand, top, zeros)
    lowered = shift_right_jam(shift, exact.significand, down)
    lowered = jam(last, last(lowered), fmt.precision + GUARD_BITS)
    exponent = last.wrap("exponent", Mux(last(below), 1, exponent.value))
    significand = last.wrap("significand", Mux(last(below), lowered, raised.value))

    return round_pack(
        final,
        fmt,
        known=known,
        sign=sign,
        exponent=exponent,
        significand=significand,
        until=start + depth,
        flags=flags,
    )
