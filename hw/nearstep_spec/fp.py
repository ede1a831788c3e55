"""Binary floating-point formats: widths, biases and special encodings; configuration of a unit."""

from dataclasses import dataclass
from typing import Annotated

from nearstep_spec.codec import Option
from nearstep_spec.errors import NearstepError

__all__ = ["BF16", "FLAG_NAMES", "FP16", "FP32", "FormatError", "FpFormat", "UnitConfig"]

FLAG_NAMES = ("inexact", "underflow", "overflow", "divide_by_zero", "invalid")
"""Exception flags of every unit, from bit 0."""


class FormatError(NearstepError, ValueError):
    """A format that has no binary interchange encoding."""


@dataclass(frozen=True)
class FpFormat:
    """IEEE 754 style binary format: 1 sign bit, `exponent` bits, `mantissa` stored fraction bits.

    The all-ones exponent holds infinities and NaN; the all-zeros exponent zeros and subnormals. The
    top fraction bit set marks a quiet NaN. All bit patterns are unsigned integers.

    Parameters
    ----------
    exponent : 2 or more.
    mantissa : 1 or more; 2 or more to tell a signalling NaN from infinity.

    Ref: IEEE 754-2019, 3.4 (interchange formats), 6.2.1 (NaN encodings).
    """

    exponent: int
    mantissa: int

    def __post_init__(self) -> None:
        for field, low in (("exponent", 2), ("mantissa", 1)):
            value = getattr(self, field)
            if not isinstance(value, int) or value < low:
                raise FormatError(f"{field} must be an integer of at least {low}, not {value!r}")

    @property
    def width(self) -> int:
        """Bits in all."""
        return 1 + self.exponent + self.mantissa

    @property
    def precision(self) -> int:
        """Significand bits, the hidden one included."""
        return self.mantissa + 1

    @property
    def bias(self) -> int:
        return (1 << (self.exponent - 1)) - 1

    @property
    def emax(self) -> int:
        """Exponent of the largest finite number."""
        return self.bias

    @property
    def emin(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias

    @property
    def exponent_ones(self) -> int:
        """The exponent field of infinities and NaN."""
        return (1 << self.exponent) - 1

    @property
    def sign_bit(self) -> int:
        """Pattern of -0."""
        return 1 << (self.width - 1)

    @property
    def infinity(self) -> int:
        """Pattern of +inf."""
        return self.exponent_ones << self.mantissa

    @property
    def quiet_nan(self) -> int:
        """Pattern of the default NaN, the only one returned: positive, quiet, payload 0."""
        return self.infinity | (1 << (self.mantissa - 1))

    @property
    def max_finite(self) -> int:
        """Pattern of the largest finite number."""
        return self.infinity - 1

    @property
    def min_normal(self) -> int:
        """Pattern of the smallest positive normal number."""
        return 1 << self.mantissa

    @property
    def max_subnormal(self) -> int:
        """Pattern of the largest positive subnormal number."""
        return self.min_normal - 1

    @property
    def one(self) -> int:
        """Pattern of 1.0."""
        return self.bias << self.mantissa

    @property
    def name(self) -> str:
        """`fp32`, `fp16`, `bf16`, else `fp_e<exponent>m<mantissa>`."""
        return _NAMES.get((self.exponent, self.mantissa), f"fp_e{self.exponent}m{self.mantissa}")


_NAMES = {(8, 23): "fp32", (5, 10): "fp16", (8, 7): "bf16"}

FP32 = FpFormat(8, 23)
FP16 = FpFormat(5, 10)
BF16 = FpFormat(8, 7)


@dataclass(frozen=True, kw_only=True)
class UnitConfig:
    """A floating-point unit."""

    depth: Annotated[
        int | None, Option(meaning="latency in cycles", allowed="1 to 256", unset="for its clock")
    ] = None
    flags: Annotated[bool, Option(meaning="whether it has exception flags")] = True
