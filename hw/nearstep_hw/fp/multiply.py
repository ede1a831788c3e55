"""Exact product of two significands, in stages that map onto DSP blocks; its exponent and sign."""

from dataclasses import dataclass

from amaranth.hdl import Cat, Const, Value

from nearstep_hw.fp.operand import Operand
from nearstep_hw.fp.pipeline import Staged, Step
from nearstep_spec.fp import FpFormat

__all__ = ["MULTIPLIER_BITS", "Product", "product"]

MULTIPLIER_BITS = 17
"""Unsigned width of the narrow input of an FPGA multiplier (DSP48E2: 27 x 18 signed)."""


@dataclass(frozen=True, eq=False)
class Product:
    """Exact product of two finite operands.

    Attributes
    ----------
    sign : 1 bit, a value at the first step.
    exponent : signed, biased; that of the top bit of `significand`; a value at the first step.
    significand : `2 * fmt.precision` bits.
    """

    sign: Value
    exponent: Value
    significand: Staged


def product(multiply: Step, total: Step, fmt: FpFormat, x: Operand, y: Operand) -> Product:
    """Multiply the operands `x` and `y`, which are at the step `multiply`.

    The first step forms partial products of at most 17 bits of `y`, the second adds them: two
    DSP48E2 for binary32. The significand is present from the step `total` on.
    """
    pieces = [
        multiply.wrap(f"partial_{low}", x.significand * y.significand[low : low + MULTIPLIER_BITS])
        for low in range(0, fmt.precision, MULTIPLIER_BITS)
    ]
    width = 2 * fmt.precision
    terms = [Cat(Const(0, k * MULTIPLIER_BITS), total(piece)) for k, piece in enumerate(pieces)]
    significand = total.wrap("product", sum(terms[1:], terms[0])[:width])
    return Product(
        sign=x.sign ^ y.sign,
        exponent=x.exponent + y.exponent - (fmt.bias - 1),
        significand=significand,
    )
