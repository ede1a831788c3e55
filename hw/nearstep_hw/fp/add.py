"""Addition and subtraction."""

from amaranth.hdl import Cat, Const, Mux

from nearstep_hw.fp.operand import unpack
from nearstep_hw.fp.pipeline import Pipeline, Staged
from nearstep_hw.fp.result import FpResult
from nearstep_hw.fp.round import GUARD_BITS, count_leading_zeros, normalise, round_pack, special
from nearstep_hw.fp.shift import clip, shift_right_jam
from nearstep_spec.fp import FpFormat

__all__ = ["DEPTH", "add"]

_COSTS = (0.7, 1, 0.6, 1, 0.6, 0.7)
DEPTH = 5
"""Latency in cycles, unless asked otherwise."""


def add(
    pipe: Pipeline,
    fmt: FpFormat,
    a: Staged,
    b: Staged,
    *,
    subtract: bool = False,
    depth: int = DEPTH,
    flags: bool = True,
) -> FpResult:
    """a + b, or a - b, rounded once.

    The operand of smaller magnitude is shifted down to the other's exponent. Three bits below the
    greater one, the last of them sticky, are enough: two operands more than one exponent apart
    cancel by one bit at most.

    *Timing*: latency `depth`, one operation a cycle. Steps: order, align, add, count leading
    zeros, shift, round; the last two share a stage at the default depth.

    *Numerics*: an exact zero sum of unlike signs is +0. A sum that is subnormal is exact.
    """
    start = pipe.latest(a, b)
    order, align, total, count, shift, final = pipe.steps(start, _COSTS, depth)

    x, y = order(a), order(b)
    if subtract:
        y = y ^ fmt.sign_bit
    swap = y[: fmt.width - 1] > x[: fmt.width - 1]
    large = order.wrap("large", Mux(swap, y, x))
    small = order.wrap("small", Mux(swap, x, y))

    x, y = unpack(fmt, align(large)), unpack(fmt, align(small))
    unlike = x.sign ^ y.sign
    cancel = unlike & x.infinite & y.infinite
    known = align.wrap(
        "known",
        special(
            nan=x.nan | y.nan | cancel,
            infinite=x.infinite,
            invalid=x.signalling | y.signalling | cancel,
        ),
    )
    low = Const(0, GUARD_BITS)
    distance = (x.exponent - y.exponent)[: fmt.exponent]
    distance = clip(align, distance, fmt.precision + GUARD_BITS)
    upper = align.wrap("upper", x.significand)
    lower = align.wrap("lower", shift_right_jam(align, Cat(low, y.significand), distance))
    top = align.wrap("top", x.exponent + 1)
    signs = align.wrap("signs", Cat(x.sign, unlike))

    x, y = Cat(low, total(upper)), total(lower)
    frame = total.wrap("frame", Mux(total(signs)[1], x - y, x + y)[: len(x) + 1])

    zeros = count.wrap("zeros", count_leading_zeros(count, count(frame), count(top)))
    cancelled = count(signs)[1] & (count(frame) == 0)
    sign = count.wrap("sign", count(signs)[0] & ~cancelled)

    exponent, significand = normalise(shift, fmt, shift(frame), shift(top), shift(zeros))
    exponent = shift.wrap("exponent", exponent)
    significand = shift.wrap("significand", significand)

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
