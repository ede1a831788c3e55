"""Exact product of two significands, in stages that map onto DSP blocks; its exponent and sign."""

from collections.abc import Sequence
from dataclasses import dataclass

from amaranth.hdl import Cat, Const, Value

from nearstep_hw.fp.operand import Operand
from nearstep_hw.fp.pipeline import Staged, Step
from nearstep_spec.fp import FpFormat

__all__ = ["Product", "product"]


@dataclass(frozen=True, eq=False)
class Product:
    """Exact product of two finite operands.

    Attributes
    ----------
    sign : 1 bit, a value at the first step.
    exponent : signed, biased; of the top bit of `significand`; a value at the first step.
    significand : `2 * fmt.precision` bits.
    """

    sign: Value
    exponent: Value
    significand: Staged


@dataclass(frozen=True, eq=False)
class _Term:
    """A summand `value * 2**low`."""

    low: int
    value: Staged

    @property
    def end(self) -> int:
        return self.low + len(self.value.value)


def product(steps: Sequence[Step], fmt: FpFormat, x: Operand, y: Operand) -> Product:
    """Multiply the operands `x` and `y`, which are at the first step.

    The second step forms partial products, whose factors have at most the bits of the pipeline's
    `multiplier`; later steps add them: two DSP48E2 for binary32, or four MULT18X18D. The
    significand is present from the last step on.
    """
    taken, multiply, *total = steps
    wide, narrow = multiply.pipe.multiplier
    factors = (taken.wrap(f"factor_{k}", each.significand) for k, each in enumerate((x, y)))
    first, second = map(multiply, factors)
    terms = [
        _Term(
            low + up,
            multiply.wrap(
                f"partial_{low}_{up}",
                first[up : up + wide] * second[low : low + narrow],
            ),
        )
        for low in range(0, fmt.precision, narrow)
        for up in range(0, fmt.precision, wide)
    ]
    for step in total:
        last = step is total[-1]
        terms = _added(step, terms)
        while last and len(terms) > 1:
            terms = _added(step, terms)
    (whole,) = terms
    significand = total[-1].wrap("product", total[-1](whole.value)[: 2 * fmt.precision])
    return Product(
        sign=x.sign ^ y.sign,
        exponent=x.exponent + y.exponent - (fmt.bias - 1),
        significand=significand,
    )


def _added(step: Step, terms: list[_Term]) -> list[_Term]:
    """Add terms in pairs, the lowest to the highest, which overlap least."""
    terms = sorted(terms, key=lambda term: term.low)
    half = len(terms) // 2
    made = [_sum(step, a, b) for a, b in zip(terms[:half], reversed(terms), strict=False)]
    return made + terms[half : len(terms) - half]


def _sum(step: Step, a: _Term, b: _Term) -> _Term:
    x, y = step(a.value), step(b.value)
    gap = b.low - a.low
    if a.end <= b.low:
        return _Term(a.low, step.wrap("joined", Cat(x, Const(0, b.low - a.end), y)))
    return _Term(a.low, step.wrap("added", Cat(x[:gap], x[gap:] + y)))
