"""Update rules: those of the package, of the examples, and some that only tests need."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep_sim.bench.operands import operands as make_operands
from nearstep_spec.rule.adagrad import ADAGRAD
from nearstep_spec.rule.adam import ADAM, ADAM_AMSGRAD, ADAM_PAPER
from nearstep_spec.rule.expr import (
    equal,
    fma,
    maximum,
    minimum,
    next_value,
    not_equal,
    select,
    sign,
    sqrt,
)
from nearstep_spec.rule.file import load_rules
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.sgd import SGD, SGD_MOMENTUM

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def _every_operation(a, b, c, *, s, flip):
    close = (abs(a - b) <= s) ^ flip
    ordered = (a < b) & not_equal(b, c) | ~(c >= a) & equal(a, c)
    return {
        "a": select(close, maximum(a, -b), minimum(b, c)),
        "b": fma(a, -b, select(ordered, c, -abs(c))) / next_value("x"),
        "x": sqrt(abs(c)) + sign(a) * 0.1,
        "y": select(a > 1.0, -next_value("x"), b),
        "z": s,
    }


LION = load_rules(EXAMPLES / "lion.py")["lion"]
RMSPROP = load_rules(EXAMPLES / "rmsprop.py")["rmsprop"]
EVERY_OPERATION = Rule(
    "every_operation",
    _every_operation,
    states=("a", "b"),
    inputs=("c",),
    outputs=("x", "y", "z"),
    scalars=("s",),
    switches=("flip",),
)
RULES = {
    rule.name: rule
    for rule in (
        ADAM, ADAM_PAPER, SGD, SGD_MOMENTUM, ADAGRAD, ADAM_AMSGRAD, LION, RMSPROP,
        EVERY_OPERATION,
    )
}  # fmt: skip


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Rule:
    """Each rule in turn."""
    return RULES[request.param]


@pytest.fixture
def rules() -> dict[str, Rule]:
    """Every rule by its name."""
    return RULES


@pytest.fixture
def every_operation() -> Rule:
    return EVERY_OPERATION


@pytest.fixture
def operands() -> Callable[[Rule, int, int], dict[str, NDArray[np.float32]]]:
    """Make `count` elements for each input of a rule, from a seed."""
    return lambda rule, count, seed: make_operands(rule.arrays_in, count, seed)
