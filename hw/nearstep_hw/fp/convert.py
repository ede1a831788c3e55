"""Conversion between formats."""

from amaranth.hdl import Mux

from nearstep_hw.fp.operand import unpack
from nearstep_hw.fp.pipeline import Parts, Pipeline, Staged
from nearstep_hw.fp.result import FpResult
from nearstep_hw.fp.round import GUARD_BITS, count_leading_zeros, normalise, round_pack, special
from nearstep_hw.fp.shift import clip_below_one, jam, shift_right_jam
from nearstep_spec.fp import FpFormat

__all__ = ["DEPTH", "convert"]

_COSTS = (Parts(0.7, (5, 3, 6, 5)), Parts(0.7, (3, 4)), Parts(0.6, (2, 4, 5)))
DEPTH = 2
"""Default latency in cycles."""


def convert(
    pipe: Pipeline,
    source: FpFormat,
    target: FpFormat,
    a: Staged,
    *,
    depth: int = DEPTH,
    flags: bool = True,
) -> FpResult:
    """a, of format `source`, rounded once to format `target`.

    *Timing*: latency `depth`, one operation a cycle. Steps: count leading zeros, shift, round (only
    those that the two formats need).

    *Numerics*: a NaN becomes the default NaN of `target`; a signalling one raises invalid.
    """
    start = pipe.latest(a)
    (rebias, *count), shift, final = pipe.steps(start, _COSTS, depth)

    x = unpack(source, rebias(a))
    width = max(source.precision, target.precision + GUARD_BITS)
    known = rebias.wrap(
        "known",
        special(nan=x.nan, infinite=x.infinite, invalid=x.signalling),
    )
    sign = rebias.wrap("sign", x.sign)
    frame = rebias.wrap("frame", jam(rebias, x.significand, width))
    exponent = rebias.wrap("rebiased", x.exponent + (target.bias - source.bias))

    if target.emin < source.emin:
        at = count[0]
        top = rebias.wrap("top", exponent.value[: target.exponent + 1])
        limit = rebias.wrap("limit", (exponent.value - 1)[: target.exponent + 1])
        zeros = count_leading_zeros(count, frame, limit)
        exponent, significand = normalise(shift, target, frame, top, zeros)
    else:
        at, last = count[0], shift[-1]
        unlimited = at(exponent)
        below, distance = clip_below_one(at, unlimited, width)
        down = at.wrap("down", distance)
        exponent = at.wrap("top", Mux(below, 1, unlimited)[: source.exponent + 1])
        lowered = frame
        if target.emin > source.emin:
            lowered = shift_right_jam(shift, frame, down)
        significand = jam(last, last(lowered), target.precision + GUARD_BITS)
        significand = last.wrap("significand", significand)

    return round_pack(
        final,
        target,
        known=known,
        sign=sign,
        exponent=exponent,
        significand=significand,
        until=start + depth,
        flags=flags,
    )
