"""Fields and classes of an encoded operand."""

from dataclasses import dataclass

from amaranth.hdl import Cat, Mux, Value

from nearstep_spec.fp import FpFormat

__all__ = ["Operand", "unpack"]


@dataclass(frozen=True, eq=False)
class Operand:
    """An encoded number taken apart, combinationally.

    Its value, if finite, is `(-1)**sign * significand * 2**(exponent - bias - mantissa)`, also for
    subnormal numbers and zeros, whose exponent is 1 and whose significand is below `2**mantissa`.

    Attributes
    ----------
    sign : 1 bit.
    exponent : biased, `fmt.exponent` bits, at least 1.
    significand : hidden bit and fraction, `fmt.precision` bits.
    zero, infinite, nan, signalling : 1 bit each; `signalling` implies `nan`.
    """

    sign: Value
    exponent: Value
    significand: Value
    zero: Value
    infinite: Value
    nan: Value
    signalling: Value


def unpack(fmt: FpFormat, x: Value) -> Operand:
    """Split the pattern `x` (`fmt.width` bits) into its fields, and classify it."""
    fraction = x[: fmt.mantissa]
    field = x[fmt.mantissa : fmt.width - 1]
    normal = field.any()
    special = field == fmt.exponent_ones
    nan = special & fraction.any()
    return Operand(
        sign=x[fmt.width - 1],
        exponent=Mux(normal, field, 1)[: fmt.exponent],
        significand=Cat(fraction, normal),
        zero=x[: fmt.width - 1] == 0,
        infinite=special & ~fraction.any(),
        nan=nan,
        signalling=nan & ~fraction[-1],
    )
