"""Several rules as one: the same bits as each by itself, with fewer units."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from nearstep_sim.golden.rule import evaluate
from nearstep_spec.rule.adagrad import ADAGRAD
from nearstep_spec.rule.adam import ADAM, ADAM_PAPER
from nearstep_spec.rule.combine import combine, selector
from nearstep_spec.rule.errors import RuleError
from nearstep_spec.rule.expr import fma
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.sgd import SGD, SGD_MOMENTUM

RULES = (ADAM, SGD, SGD_MOMENTUM, ADAGRAD)
COUNT = 4096
SEED = 91


def operands(rng, count):
    """Any pattern, and ordinary numbers."""
    words = rng.integers(0, 1 << 32, count, dtype=np.uint32).view(np.float32)
    ordinary = rng.standard_normal(count).astype(np.float32)
    return np.where(rng.random(count) < 0.5, words, ordinary)


@pytest.mark.parametrize("size", [2, 3, 4])
def test_a_combination_is_each_of_its_rules(size):
    print(f"seed {SEED}")
    rng = np.random.default_rng(SEED)
    compared = 0
    for rules in itertools.permutations(RULES, size):
        whole = combine("whole", rules)
        arrays = {name: operands(rng, COUNT // 8) for name in whole.arrays_in}
        for number, rule in enumerate(rules):
            scalars = {name: float(rng.standard_normal()) for name in whole.scalars}
            scalars = {name: float(np.float32(value)) for name, value in scalars.items()}
            own = {name: int(rng.integers(2)) for name in whole.switches}
            for other in range(1, len(rules)):
                own[selector(rules[other])] = int(other == number)
            expected = evaluate(
                rule,
                {name: arrays[name] for name in rule.arrays_in},
                {name: (scalars | own)[name] for name in rule.registers()},
            )
            found = evaluate(whole, arrays, scalars | own)
            for name, array in expected.items():
                np.testing.assert_array_equal(
                    found[name].view(np.uint32), array.view(np.uint32), f"{rule.name} {name}"
                )
                compared += array.size
    print(f"{compared} values compared")
    assert compared > 10_000


def test_units_are_shared():
    alone = [sum(rule.program.units().values()) for rule in RULES]
    together = combine("whole", RULES).program.units()
    print(dict(together))
    assert sum(together.values()) <= max(alone) + 2
    assert sum(together.values()) < sum(alone) / 1.8
    for unit in ("div", "sqrt"):
        assert together[unit] == max(rule.program.units().get(unit, 0) for rule in RULES)


def test_the_order_of_rules_changes_no_bit_and_both_orders_of_adam_combine():
    whole = combine("both", (ADAM, ADAM_PAPER))
    assert selector(ADAM_PAPER) in whole.switches
    assert selector(ADAM) not in whole.switches


def contrary(g, p, *, step_size):
    return {"p": fma(step_size, g, p)}


def test_what_cannot_be_combined_says_why():
    with pytest.raises(ValueError, match="at least two"):
        combine("one", (ADAM,))
    with pytest.raises(ValueError, match="different names"):
        combine("twice", (ADAM, ADAM))
    other = Rule("contrary", contrary, states=("p",), inputs=("g",), scalars=("step_size",))
    with pytest.raises(RuleError, match=r"test_combine.py:\d+: Arrays .* must have one order"):
        combine("order", (ADAM, other))
