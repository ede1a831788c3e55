"""Conversion between elements of 16 bits and binary32."""

from amaranth.hdl import Cat, Const, Mux

from nearstep_hw.fp import convert
from nearstep_hw.fp.pipeline import Pipeline, Staged
from nearstep_spec.fp import FP32, FpFormat

DEPTH = convert.DEPTH
"""Latency of both conversions in cycles."""

_LOW = 16  # bits that bfloat16 lacks


def widen(pipe: Pipeline, fmt: FpFormat, a: Staged) -> Staged:
    """Widen `a` of 16 bits to binary32 exactly; a NaN becomes the default NaN.

    *Timing*: latency `DEPTH`.
    """
    if fmt.exponent != FP32.exponent:
        return convert.convert(pipe, fmt, FP32, a, depth=DEPTH, flags=False).z
    stage = pipe.latest(a) + DEPTH
    short = pipe.at(a, stage)
    nan = short[:-1] > fmt.infinity
    return pipe.wrap(Mux(nan, FP32.quiet_nan, Cat(Const(0, _LOW), short)), stage, "widened")


def narrow(pipe: Pipeline, fmt: FpFormat, a: Staged) -> Staged:
    """Round `a` of binary32 to 16 bits; a NaN becomes the default NaN.

    With equal exponent widths, rounding is one addition to the pattern: a carry out of the fraction
    gives the next binade, or infinity after the last one.

    *Timing*: latency `DEPTH`.
    """
    if fmt.exponent != FP32.exponent:
        return convert.convert(pipe, FP32, fmt, a, depth=DEPTH, flags=False).z
    start = pipe.latest(a)
    word = pipe.at(a, start)
    nan = word[:-1] > FP32.infinity
    half = Const((1 << (_LOW - 1)) - 1, _LOW)
    rounded = (word + half + word[_LOW])[_LOW : FP32.width]
    short = pipe.wrap(Mux(nan, fmt.quiet_nan, rounded), start, "rounded")
    return pipe.delayed(short, start + DEPTH)
