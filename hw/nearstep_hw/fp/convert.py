"""Conversion between formats."""

from amaranth.hdl import Mux

from nearstep_hw.fp.operand import unpack
from nearstep_hw.fp.pipeline import Pipeline, Staged
from nearstep_hw.fp.result import FpResult
from nearstep_hw.fp.round import GUARD_BITS, count_leading_zeros, normalise, round_pack, special
from nearstep_hw.fp.shift import clip, jam, shift_right_jam
from nearstep_spec.fp import FpFormat

__all__ = ["DEPTH", "convert"]

_COSTS = (0.7, 0.7, 0.6)
DEPTH = 2
"""Latency in cycles, unless asked otherwise."""


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

    *Timing*: latency `depth`, one operation a cycle. Steps: count leading zeros, shift, round
    (those that the two formats need; the rest is wiring).

    *Numerics*: a NaN becomes the default NaN of `target`; a signalling one raises invalid.
    """
    start = pipe.latest(a)
    count, shift, final = pipe.steps(start, _COSTS, depth)

    x = unpack(source, count(a))
    width = max(source.precision, target.precision + GUARD_BITS)
    known = count.wrap(
        "known",
        special(nan=x.nan, infinite=x.infinite, invalid=x.signalling),
    )
    sign = count.wrap("sign", x.sign)
    frame = count.wrap("frame", jam(count, x.significand, width))
    exponent = count.signal("rebiased", x.exponent + (target.bias - source.bias))

    if target.emin < source.emin:
        top = count.wrap("top", exponent[: target.exponent + 1])
        zeros = count.wrap("zeros", count_leading_zeros(count, frame.value, top.value))
        exponent, significand = normalise(shift, target, shift(frame), shift(top), shift(zeros))
    else:
        below = exponent < 1
        distance = Mux(below, 1 - exponent, 0)[: source.exponent + 1]
        down = count.wrap("down", clip(count, distance, width))
        top = count.wrap("top", Mux(below, 1, exponent)[: source.exponent + 1])
        lowered = frame
        if target.emin > source.emin:
            lowered = shift.wrap("lowered", shift_right_jam(shift, shift(frame), shift(down)))
        exponent, significand = (
            shift(top),
            jam(shift, shift(lowered), target.precision + GUARD_BITS),
        )
    exponent = shift.wrap("exponent", exponent)
    significand = shift.wrap("significand", significand)

    return round_pack(
        final,
        target,
        known=final(known),
        sign=final(sign),
        exponent=final(exponent),
        significand=final(significand),
        until=start + depth,
        flags=flags,
    )
