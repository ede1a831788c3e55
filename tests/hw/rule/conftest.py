"""Update rules other than Adam, and operands that reach every special case."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep_hw.rule.adagrad import ADAGRAD
from nearstep_hw.rule.adam import ADAM, ADAM_PAPER
from nearstep_hw.rule.expr import (
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
from nearstep_hw.rule.rule import Rule
from nearstep_hw.rule.sgd import SGD, SGD_MOMENTUM


def _lion(p, g, m, *, decay, update_weight, m_weight, step_size):
    update = sign(fma(update_weight, g - m, m))
    return {"p": fma(step_size, update, decay * p), "m": fma(m_weight, g - m, m)}


def _amsgrad(
    p, g, m, v, v_max, *, m_weight, v_weight, v_decay, v_correction, eps, step_size
):  # fmt: skip
    m = fma(m_weight, g - m, m)
    v = fma(v_weight * g, g, v_decay * v)
    v_max = maximum(v_max, v)
    denominator = sqrt(v_max) / v_correction + eps
    return {"p": p + step_size * m / denominator, "m": m, "v": v, "v_max": v_max}


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


LION = Rule(
    "lion",
    _lion,
    states=("p", "m"),
    inputs=("g",),
    scalars=("decay", "update_weight", "m_weight", "step_size"),
)
AMSGRAD = Rule(
    "amsgrad",
    _amsgrad,
    states=("p", "m", "v", "v_max"),
    inputs=("g",),
    scalars=("m_weight", "v_weight", "v_decay", "v_correction", "eps", "step_size"),
)
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
        ADAM, ADAM_PAPER, SGD, SGD_MOMENTUM, ADAGRAD, AMSGRAD, LION, EVERY_OPERATION
    )
}  # fmt: skip

SPECIALS = np.array(
    [
        0x0000_0000, 0x8000_0000, 0x0000_0001, 0x8000_0001, 0x007F_FFFF, 0x807F_FFFF,
        0x0080_0000, 0x8080_0000, 0x0080_0001, 0x3F7F_FFFF, 0x3F80_0000, 0xBF80_0000,
        0x3F80_0001, 0x3F00_0000, 0x7F7F_FFFF, 0xFF7F_FFFF, 0x7F80_0000, 0xFF80_0000,
        0x7FC0_0000, 0xFFC0_0000, 0x7F80_0001, 0xFFFF_FFFF,
    ],
    np.uint32,
)  # fmt: skip


@pytest.fixture(params=RULES)
def rule(request: pytest.FixtureRequest) -> Rule:
    """Each rule in turn."""
    return RULES[request.param]


@pytest.fixture
def rules() -> dict[str, Rule]:
    """Every rule by its name."""
    return RULES


@pytest.fixture
def lion() -> Rule:
    return LION


@pytest.fixture
def every_operation() -> Rule:
    return EVERY_OPERATION


@pytest.fixture
def operands() -> Callable[[Rule, int, int], dict[str, NDArray[np.float32]]]:
    """Makes `count` elements for each input of a rule, from a seed.

    The first 22**n elements are every combination of special patterns where n arrays allow it, then
    random patterns, ordinary numbers, and patterns that differ in few bits from each other.
    """

    def make(rule: Rule, count: int, seed: int) -> dict[str, NDArray[np.float32]]:
        rng = np.random.default_rng(seed)
        names = rule.arrays_in
        uniform = rng.integers(0, 2**32, (len(names), count), dtype=np.uint32)
        ordinary = rng.standard_normal((len(names), count)).astype(np.float32)
        ordinary *= (10.0 ** rng.integers(-9, 4, (len(names), count))).astype(np.float32)
        ordinary = ordinary.view(np.uint32)
        close = ordinary[:1] + rng.integers(-2, 3, (len(names), count)).astype(np.uint32)
        close ^= rng.integers(0, 2, (len(names), count), dtype=np.uint32) << np.uint32(31)
        special = SPECIALS[rng.integers(0, len(SPECIALS), (len(names), count))]
        kind = rng.integers(0, 4, count)
        mixed = rng.integers(0, 4, (len(names), count))
        kinds = np.where(rng.random(count) < 0.3, mixed, kind)
        words = np.choose(kinds, [uniform, ordinary, close, special])
        crossed = np.stack(np.meshgrid(*[SPECIALS] * min(len(names), 4), indexing="ij"))
        crossed = crossed.reshape(len(crossed), -1)[:, : count // 2]
        words[: len(crossed), : crossed.shape[1]] = crossed
        return {
            name: np.ascontiguousarray(row).view(np.float32)
            for name, row in zip(names, words, strict=True)
        }

    return make
