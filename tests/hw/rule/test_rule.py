"""Definitions of update rules: what is shared, what is folded, and what is refused."""

import math
import re
from collections.abc import Callable

import numpy as np
import pytest

from nearstep_spec.rule.adam import ADAM, ADAM_PAPER
from nearstep_spec.rule.errors import (
    MissingParameterError,
    MissingScalarError,
    RuleCycleError,
    RuleError,
    RuleTypeError,
    UnassignedOutputError,
    UnknownNameError,
    UnusedNameError,
)
from nearstep_spec.rule.expr import float32_bits, fma, next_value, select, sqrt
from nearstep_spec.rule.rule import Rule


def _rule(definition: Callable[..., object], **names: tuple[str, ...]) -> Rule:
    return Rule("r", definition, **{"states": ("p",), **names})


def test_adam_declares_its_ports_registers_and_units() -> None:
    assert ADAM.arrays_in == ("p", "g", "m", "v")
    assert ADAM.arrays_out == ("p", "m", "v")
    assert list(ADAM.registers().values()) == [32] * 7 + [1] * 2
    assert ADAM.units() == {"add": 2, "sub": 1, "mul": 3, "div": 2, "fma": 3, "sqrt": 1}
    assert ADAM_PAPER.units() == {"add": 4, "sub": 1, "mul": 7, "div": 3, "sqrt": 1}


def test_equal_operations_are_one_operation() -> None:
    rule = _rule(lambda p, g: {"p": (p + g) * (g + p) + fma(p, g, p) / fma(g, p, p)}, inputs=("g",))
    assert rule.units() == {"add": 2, "mul": 1, "div": 1, "fma": 1}


def test_operations_without_use_are_left_out() -> None:
    def define(p):
        sqrt(p)
        return {"p": p + 1.0}

    assert _rule(define).units() == {"add": 1}


def test_operands_come_before_their_use(rule: Rule) -> None:
    edges = [
        (operand, index)
        for index, each in enumerate(rule.program.operations)
        for operand in each.operands
    ]
    assert edges
    assert all(operand < index for operand, index in edges)


def test_digest_depends_on_the_arithmetic_alone() -> None:
    first = _rule(lambda p: {"p": p * p})
    second = _rule(lambda p: {"p": p * p})
    third = _rule(lambda p: {"p": p + p})
    assert first.program.digest() == second.program.digest() != third.program.digest()


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        (lambda one: one + 2.0, 3.0),
        (lambda one: one - 2.0, -1.0),
        (lambda one: one * -3.0, -3.0),
        (lambda one: one / 3.0, np.float32(1) / np.float32(3)),
        (lambda one: abs(-one), 1.0),
        (lambda one: sqrt(one + one), np.sqrt(np.float32(2))),
        (lambda one: one / 0.0, math.inf),
        (lambda one: fma(one * (1 + 2**-12), 1 + 2**-12, -1.0), 2**-11 + 2**-24),
        # The exact sum lies just above a tie of binary32, closer to it than binary64 can tell.
        (lambda one: fma(one * (2**-40), 2**-40, 1 + 2**-23) + 0.0, 1 + 2**-23),
    ],
)
def test_arithmetic_on_constants_is_done_at_once(expression, expected) -> None:
    def define(p):
        return {"p": p + expression(sqrt(1.0))}

    rule = _rule(define)
    assert rule.units() == {"add": 1}
    constants = [each.bits for each in rule.program.operations if each.op == "constant"]
    assert constants == [float32_bits(float(expected))]


def _folded(expression: object) -> list[int]:
    rule = _rule(lambda p: {"p": p + expression})
    return [each.bits for each in rule.program.operations if each.op == "constant"]


def test_folded_fma_rounds_once() -> None:
    # a * a is 1 + 2**-11 + 2**-24, a tie between two binary32 numbers; the addend tips it.
    a = 1 + 2**-12
    assert _folded(fma(a, a, 2**-80)) == [float32_bits(1 + 2**-11 + 2**-23)]
    assert _folded(fma(a, a, 0.0)) == [float32_bits(1 + 2**-11)]
    assert _folded(fma(a, a, -(2**-80))) == [float32_bits(1 + 2**-11)]


def test_invalid_constant_is_the_default_nan() -> None:
    assert _folded(sqrt(-1.0)) == [0x7FC0_0000]


@pytest.mark.parametrize(
    ("number", "bits"),
    [
        (1.0, 0x3F80_0000),
        (-0.0, 0x8000_0000),
        (1e-45, 1),
        (1e39, 0x7F80_0000),
        (-1e39, 0xFF80_0000),
        (math.nan, 0x7FC0_0000),
        (3.4028235677973366e38, 0x7F80_0000),  # the tie above the largest number
        (3.4028235677973362e38, 0x7F7F_FFFF),
    ],
)
def test_constants_round_to_nearest_binary32(number: float, bits: int) -> None:
    assert float32_bits(number) == bits


def _unknown_parameter():
    return _rule(lambda p, momentum: {"p": p + momentum})


def _unknown_result():
    return _rule(lambda p: {"p": p + 1.0, "q": p * 2.0})


def _unknown_next():
    return _rule(lambda p: {"p": p + next_value("q")})


def _undefined_parameter():
    return _rule(lambda p: {"p": p}, scalars=("lr",))


def _unused_scalar():
    return _rule(lambda p, lr: {"p": p}, scalars=("lr",))


def _unused_switch():
    return _rule(lambda p, on: {"p": p}, switches=("on",))


def _unused_input():
    return _rule(lambda p, g: {"p": p}, inputs=("g",))


def _unassigned():
    return _rule(lambda p, m: {"p": p + m}, states=("p", "m"))


def _nothing_returned():
    return _rule(lambda p: None)


def _number_returned():
    return _rule(lambda p: {"p": 1.0})


def _own_next():
    return _rule(lambda p: {"p": p + next_value("p")})


def _long_cycle():
    return _rule(
        lambda p, m: {"p": p + next_value("m"), "m": m * sqrt(next_value("p"))}, states=("p", "m")
    )


def _text_operand():
    return _rule(lambda p: {"p": p + "1"})


def _boolean_operand():
    return _rule(lambda p: {"p": p * True})


def _python_condition():
    return _rule(lambda p: {"p": p if p > 0.0 else -p})


def _python_equality():
    return _rule(lambda p: {"p": select(p == 0.0, p, p)})


def _value_as_condition():
    return _rule(lambda p: {"p": select(p, p, p)})


def _condition_as_value():
    return _rule(lambda p, on: {"p": p * on}, switches=("on",))


def _twice():
    return _rule(lambda p: {"p": p}, inputs=("p",))


def _bad_name():
    return _rule(lambda p: {"p": p}, inputs=("not a name",))


def _foreign_name():
    return _rule(lambda p, β: {"p": p + β}, inputs=("β",))


def _control_port():
    return _rule(lambda p, valid: {"p": p + valid}, inputs=("valid",))


@pytest.mark.parametrize(
    ("mistake", "error", "text"),
    [
        (_unknown_parameter, UnknownNameError, "'momentum'; declared: p"),
        (_unknown_result, UnknownNameError, "'q'; declared: p"),
        (_unknown_next, UnknownNameError, "'q'; declared: p"),
        (_undefined_parameter, MissingParameterError, "'lr' is declared but is no parameter"),
        (_unused_scalar, UnusedNameError, "Scalar 'lr' is declared but not used"),
        (_unused_switch, UnusedNameError, "Switch 'on' is declared but not used"),
        (_unused_input, UnusedNameError, "Input 'g' is declared but not used"),
        (_unassigned, UnassignedOutputError, "assigned to m; the definition returns p"),
        (_nothing_returned, RuleTypeError, "must return a mapping"),
        (_number_returned, RuleTypeError, "'p' must be a symbolic value, not 1.0"),
        (_own_next, RuleCycleError, "depends on itself: add"),
        (_long_cycle, RuleCycleError, "add -> next m -> mul -> sqrt -> next p -> add"),
        (_text_operand, RuleTypeError, "not '1'"),
        (_boolean_operand, RuleTypeError, "not True"),
        (_python_condition, RuleTypeError, "select"),
        (_python_equality, RuleTypeError, "equal"),
        (_value_as_condition, RuleTypeError, "comparison or a switch"),
        (_condition_as_value, RuleTypeError, "symbolic value or a number"),
        (_twice, RuleError, "declared twice"),
        (_bad_name, RuleError, "identifier"),
        (_foreign_name, RuleError, "ASCII identifier"),
        (_control_port, RuleError, "control port"),
    ],
)
def test_mistakes_are_refused_with_file_and_line(mistake, error, text) -> None:
    with pytest.raises(error, match=re.escape(text)) as caught:
        mistake()
    first = mistake.__code__.co_firstlineno
    assert caught.value.location.file == __file__
    assert first < caught.value.location.line <= first + 3
    assert str(caught.value).startswith(f"{__file__}:{caught.value.location.line}: ")


def test_missing_and_unknown_scalars_are_refused() -> None:
    given = {name: 0.0 for name in ADAM.registers() if name not in ("eps", "m_from_g")}
    with pytest.raises(MissingScalarError, match="No value for eps, m_from_g; given: decay"):
        ADAM.check_scalars(given)
    with pytest.raises(UnknownNameError, match="'lr'; declared: decay, m_weight"):
        ADAM.check_scalars(dict.fromkeys((*ADAM.registers(), "lr"), 0.0))
