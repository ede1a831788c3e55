# amaranth: UnusedElaboratable=no
"""Combined rules in every back end, their area, and what they share."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.functional_unit import VerilatedUnit
from nearstep_sim.bench.operands import operands, registers
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.golden.rule_cpp import kernel
from nearstep_sim.synthesis import ultrascale_plus_cells
from nearstep_spec.rule.adagrad import ADAGRAD
from nearstep_spec.rule.adam import ADAM
from nearstep_spec.rule.combine import combine, selector
from nearstep_spec.rule.errors import RuleError
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.sgd import SGD, SGD_MOMENTUM

FOUR = (ADAM, SGD_MOMENTUM, SGD, ADAGRAD)


@pytest.fixture(scope="module")
def four() -> Rule:
    return combine("general", FOUR)


def _compare(whole: Rule, rules: Sequence[Rule], run: Callable, count: int, seeds: range) -> int:
    """Results compared, of each rule run by `run` on the common datapath."""
    compared = 0
    for rule in rules:
        for seed in seeds:
            arrays = operands(whole.arrays_in, count, seed)
            scalars = registers(dict(rule.registers()), seed)
            given = {**dict.fromkeys(whole.registers(), 0.0), **scalars}
            given |= {selector(each): int(each is rule) for each in rules[1:]}
            expected = evaluate(rule, {name: arrays[name] for name in rule.arrays_in}, scalars)
            got = run(arrays, given)
            for name, words in expected.items():
                same = got[name].view(np.uint32) == words.view(np.uint32)
                assert same.all(), (rule.name, name, seed)
                compared += words.size
    return compared


def test_model_and_kernel_of_four_rules_equal_each_rule(four: Rule) -> None:
    def in_place(arrays, scalars):
        arrays = {name: array.copy() for name, array in arrays.items()}
        kernel(four)(arrays, scalars)
        return arrays

    compared = _compare(four, FOUR, lambda a, s: evaluate(four, a, s), 30_011, range(4))
    compared += _compare(four, FOUR, in_place, 300_007, range(4))
    print(f"{compared} results compared")
    assert compared == 8 * 4 * (30_011 + 300_007)


@pytest.mark.deep
@pytest.mark.parametrize("count", [60_013, 1_000_000])
def test_unit_of_four_rules_equals_each_rule(four: Rule, count: int) -> None:
    unit = VerilatedUnit(FunctionalUnit(four), cxxflags=["-O1"])

    def run(arrays, scalars):
        stalls = {"stall": 0.3, "bubble": 0.3} if count % 2 and scalars["eps"] > 0 else {}
        outcome = unit.run(arrays, scalars, **stalls)
        assert (outcome.missing, outcome.extra, outcome.changes_while_idle) == (0, 0, 0)
        return outcome.arrays

    compared = _compare(four, FOUR, run, count, range(3))
    unit.close()
    print(f"{compared} results compared")
    assert compared == 8 * 3 * count


def _separate(rules: Sequence[Rule]) -> int:
    return sum(sum(rule.units().values()) for rule in rules)


def test_four_rules_need_no_unit_more_than_adam(four: Rule) -> None:
    print(f"shared {dict(four.units())}, separate {_separate(FOUR)}")
    assert sum(four.units().values()) == sum(ADAM.units().values()) == 12
    assert _separate(FOUR) == 26


def test_any_rules_combine(rules: dict[str, Rule]) -> None:
    names = [each for each in rules if each != "every_operation"]
    rng = np.random.default_rng(9)
    compared = 0
    for _ in range(6):
        chosen = [rules[name] for name in rng.permutation(names)[: rng.integers(2, 5)]]
        whole = combine("some", chosen)
        compared += _compare(whole, chosen, lambda a, s, w=whole: evaluate(w, a, s), 2003, range(3))
        assert sum(whole.units().values()) < _separate(chosen)
    print(f"seed 9: {compared} results compared")
    assert compared > 30_000


def test_rules_of_other_arrays_and_outputs_combine(rules: dict[str, Rule]) -> None:
    chosen = [rules["every_operation"], rules["lion"]]
    whole = combine("both", chosen)
    assert whole.outputs == ("x", "y", "z")
    assert _compare(whole, chosen, lambda a, s: evaluate(whole, a, s), 5003, range(4)) > 100_000


def test_the_same_rules_give_the_same_datapath() -> None:
    first, second = (combine("general", FOUR).program.digest() for _ in range(2))
    assert first == second


def test_a_name_of_two_kinds_is_refused() -> None:
    odd = Rule("odd", lambda p, *, m: {"p": p * m}, states=("p",), scalars=("m",))
    with pytest.raises(RuleError, match="'m' is of kind scalar here, and of kind array in another"):
        combine("odd", [ADAM, odd])
    named = Rule(
        "named", lambda p, *, is_sgd: {"p": p * is_sgd}, states=("p",), scalars=("is_sgd",)
    )
    with pytest.raises(RuleError, match="'is_sgd' is the switch of the rule"):
        combine("named", [named, SGD])


@pytest.mark.deep
def test_area_of_four_rules_is_below_that_of_four_datapaths(four: Rule) -> None:
    def area(rule: Rule) -> dict[str, int]:
        cells = ultrascale_plus_cells(to_verilog(FunctionalUnit(rule), "unit"), "unit")
        kinds = {"DSP": "DSP48E2", "LUT": "LUT", "FF": "FD", "RAM": "RAM"}
        return {
            kind: sum(count for name, count in cells.items() if name.startswith(start))
            for kind, start in kinds.items()
        }

    together = area(four)
    each = {rule.name: area(rule) for rule in FOUR}
    print(f"shared {together}; separate {each}")
    for kind in ("DSP", "LUT"):
        assert 0 < together[kind] < 0.75 * sum(one[kind] for one in each.values())
