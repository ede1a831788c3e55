"""Symbolic binary32 values for the arithmetic of an update rule."""

import math
import struct
import sys
from typing import NoReturn, TypeAlias, Union

from nearstep_spec.rule.errors import Location, RuleTypeError

__all__ = [
    "Condition",
    "Expression",
    "Value",
    "ValueLike",
    "equal",
    "float32_bits",
    "fma",
    "maximum",
    "minimum",
    "next_value",
    "not_equal",
    "select",
    "sign",
    "sqrt",
]

ValueLike: TypeAlias = Union["Value", float, int]


def _here() -> Location:
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return Location(frame.f_code.co_filename, frame.f_lineno)


def float32_bits(number: float) -> int:
    """Return the binary32 pattern nearest to `number`, ties to even; overflow results in infinity.

    A NaN results in the quiet default 0x7FC00000.
    """
    if math.isnan(number):
        return 0x7FC0_0000
    try:
        return int(struct.unpack("<I", struct.pack("<f", number))[0])
    except OverflowError:
        return 0xFF80_0000 if number < 0 else 0x7F80_0000


class Expression:
    """One node of a rule's arithmetic.

    Attributes
    ----------
    op : a key of `nearstep_spec.rule.program.OPERATIONS`, or `next` of `next_value`.
    name : of an array, a scalar, a switch or a `next`; empty for everything else.
    bits : pattern of a constant; 0 for everything else.
    location : the line of this expression; of a parameter, that of the rule's function.
    """

    __slots__ = ("bits", "location", "name", "op", "operands")

    def __init__(self, op: str, *operands: "Expression", name: str = "", bits: int = 0) -> None:
        self.op = op
        self.operands = operands
        self.name = name
        self.bits = bits
        self.location = _here()

    def __repr__(self) -> str:
        inner = self.name or (f"{self.bits:#010x}" if self.op == "constant" else "...")
        return f"<{self.op} {inner} at {self.location}>"

    def __bool__(self) -> NoReturn:
        raise RuleTypeError(
            "A symbolic expression has no truth value while the rule is written; "
            "choose with select(condition, a, b)",
            _here(),
        )


class Value(Expression):
    """A binary32 value of each element, or of a register.

    `+ - * /` round once each, to nearest even, as IEEE 754 says; a NaN result is 0x7FC00000. Unary
    `-` and `abs()` change the sign bit only, also of a NaN. `< <= > >=` are false when an operand
    is NaN; see `equal` for equality.
    """

    __slots__ = ()

    def __add__(self, other: ValueLike) -> "Value":
        return Value("add", self, _value(other))

    def __radd__(self, other: ValueLike) -> "Value":
        return Value("add", _value(other), self)

    def __sub__(self, other: ValueLike) -> "Value":
        return Value("sub", self, _value(other))

    def __rsub__(self, other: ValueLike) -> "Value":
        return Value("sub", _value(other), self)

    def __mul__(self, other: ValueLike) -> "Value":
        return Value("mul", self, _value(other))

    def __rmul__(self, other: ValueLike) -> "Value":
        return Value("mul", _value(other), self)

    def __truediv__(self, other: ValueLike) -> "Value":
        return Value("div", self, _value(other))

    def __rtruediv__(self, other: ValueLike) -> "Value":
        return Value("div", _value(other), self)

    def __neg__(self) -> "Value":
        return Value("neg", self)

    def __pos__(self) -> "Value":
        return self

    def __abs__(self) -> "Value":
        return Value("abs", self)

    def __lt__(self, other: ValueLike) -> "Condition":
        return Condition("lt", self, _value(other))

    def __le__(self, other: ValueLike) -> "Condition":
        return Condition("le", self, _value(other))

    def __gt__(self, other: ValueLike) -> "Condition":
        return Condition("lt", _value(other), self)

    def __ge__(self, other: ValueLike) -> "Condition":
        return Condition("le", _value(other), self)

    def __eq__(self, other: object) -> NoReturn:
        raise RuleTypeError("Compare symbolic values with equal(a, b) or not_equal(a, b)", _here())

    def __ne__(self, other: object) -> NoReturn:
        raise RuleTypeError("Compare symbolic values with equal(a, b) or not_equal(a, b)", _here())

    __hash__ = object.__hash__


class Condition(Expression):
    """One bit: a switch, a comparison, or `~ & | ^` of those."""

    __slots__ = ()

    def __invert__(self) -> "Condition":
        return Condition("not", self)

    def __and__(self, other: "Condition") -> "Condition":
        return Condition("and", self, _condition(other))

    def __or__(self, other: "Condition") -> "Condition":
        return Condition("or", self, _condition(other))

    def __xor__(self, other: "Condition") -> "Condition":
        return Condition("xor", self, _condition(other))


def _value(operand: ValueLike) -> Value:
    if isinstance(operand, Value):
        return operand
    if isinstance(operand, (int, float)) and not isinstance(operand, bool):
        try:
            return Value("constant", bits=float32_bits(float(operand)))
        except OverflowError:
            pass
    raise RuleTypeError(f"Operand must be a symbolic value or a number, not {operand!r}", _here())


def _condition(operand: "Condition") -> Condition:
    if not isinstance(operand, Condition):
        raise RuleTypeError(f"Operand must be a comparison or a switch, not {operand!r}", _here())
    return operand


def fma(a: ValueLike, b: ValueLike, c: ValueLike) -> Value:
    """a * b + c, rounded once."""
    return Value("fma", _value(a), _value(b), _value(c))


def sqrt(a: ValueLike) -> Value:
    """Square root; -0 for -0, NaN for smaller numbers."""
    return Value("sqrt", _value(a))


def maximum(a: ValueLike, b: ValueLike) -> Value:
    """The larger; NaN if either is NaN; +0 is larger than -0 (IEEE 754-2019, 9.6)."""
    return Value("max", _value(a), _value(b))


def minimum(a: ValueLike, b: ValueLike) -> Value:
    """The smaller; NaN if either is NaN; -0 is smaller than +0 (IEEE 754-2019, 9.6)."""
    return Value("min", _value(a), _value(b))


def sign(a: ValueLike) -> Value:
    """1, -1, or +0 for a zero of either sign and for NaN, as `torch.sign`."""
    return Value("sign", _value(a))


def select(condition: Condition, if_true: ValueLike, if_false: ValueLike) -> Value:
    """`if_true` where `condition` holds, else `if_false`; the bits pass unchanged."""
    return Value("select", _condition(condition), _value(if_true), _value(if_false))


def equal(a: ValueLike, b: ValueLike) -> Condition:
    """IEEE equality: false for NaN, +0 equals -0."""
    return Condition("eq", _value(a), _value(b))


def not_equal(a: ValueLike, b: ValueLike) -> Condition:
    """The negation of `equal`: true for NaN."""
    return ~equal(a, b)


def next_value(name: str) -> Value:
    """Refer to the value that this rule returns for the state or output `name`.

    A value that depends on itself is a `RuleCycleError`.
    """
    return Value("next", name=name)
