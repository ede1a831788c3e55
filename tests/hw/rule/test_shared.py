# amaranth: UnusedElaboratable=no
"""Rules that share units give the bits that each gives alone."""

from collections.abc import Callable

import numpy as np
import pytest

from nearstep_hw.rule.adagrad import ADAGRAD
from nearstep_hw.rule.adam import ADAM
from nearstep_hw.rule.errors import MissingScalarError, RuleError, UnknownNameError
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.rule.rule import Rule
from nearstep_hw.rule.sgd import SGD, SGD_MOMENTUM
from nearstep_hw.rule.shared import SharedRules
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.functional_unit import VerilatedUnit
from nearstep_sim.bench.operands import operands, registers
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.golden.rule_cpp import kernel
from nearstep_sim.synthesis import ultrascale_plus_cells

FOUR = (ADAM, SGD_MOMENTUM, SGD, ADAGRAD)


@pytest.fixture(scope="module")
def four() -> SharedRules:
    return SharedRules("general", FOUR)


def _compare(shared: SharedRules, run: Callable, count: int, seeds: range) -> int:
    """Results compared, of each rule run by `run` on the common datapath."""
    compared = 0
    for rule in shared.rules:
        for seed in seeds:
            arrays = operands(shared.rule.arrays_in, count, seed)
            scalars = registers(dict(rule.registers()), seed)
            expected = evaluate(rule, {name: arrays[name] for name in rule.arrays_in}, scalars)
            got = run(arrays, shared.registers(rule.name, scalars))
            for name, words in expected.items():
                same = got[name].view(np.uint32) == words.view(np.uint32)
                assert same.all(), (rule.name, name, seed)
                compared += words.size
    return compared


def test_model_and_kernel_of_four_rules_equal_each_rule(four: SharedRules) -> None:
    def in_place(arrays, scalars):
        arrays = {name: array.copy() for name, array in arrays.items()}
        kernel(four.rule)(arrays, scalars)
        return arrays

    compared = _compare(four, lambda a, s: evaluate(four.rule, a, s), 30_011, range(4))
    compared += _compare(four, in_place, 300_007, range(4))
    print(f"{compared} results compared")
    assert compared == 8 * 4 * (30_011 + 300_007)


@pytest.mark.parametrize("count", [60_013, pytest.param(1_000_000, marks=pytest.mark.deep)])
def test_unit_of_four_rules_equals_each_rule(four: SharedRules, count: int) -> None:
    unit = VerilatedUnit(FunctionalUnit(four.rule), cxxflags=["-O1"])

    def run(arrays, scalars):
        stalls = {"stall": 0.3, "bubble": 0.3} if count % 2 and scalars["eps"] > 0 else {}
        outcome = unit.run(arrays, scalars, **stalls)
        assert (outcome.missing, outcome.extra, outcome.changes_while_idle) == (0, 0, 0)
        return outcome.arrays

    compared = _compare(four, run, count, range(3))
    unit.close()
    print(f"{compared} results compared")
    assert compared == 8 * 3 * count


def test_four_rules_need_no_unit_more_than_adam(four: SharedRules) -> None:
    print(f"shared {dict(four.units())}, separate {dict(four.separate_units())}")
    assert sum(four.units().values()) == sum(ADAM.units().values()) == 12
    assert sum(four.separate_units().values()) == 26


def test_any_rules_can_share(rules: dict[str, Rule]) -> None:
    names = [each for each in rules if each != "every_operation"]
    rng = np.random.default_rng(9)
    compared = 0
    for _ in range(6):
        chosen = [rules[name] for name in rng.permutation(names)[: rng.integers(1, 4)]]
        shared = SharedRules("some", chosen)
        compared += _compare(shared, lambda a, s, r=shared.rule: evaluate(r, a, s), 2003, range(3))
        assert sum(shared.units().values()) <= sum(shared.separate_units().values())
    print(f"seed 9: {compared} results compared")
    assert compared > 30_000


def test_rules_of_other_arrays_share_too(rules: dict[str, Rule]) -> None:
    shared = SharedRules("both", [rules["every_operation"], rules["lion"]])
    assert _compare(shared, lambda a, s: evaluate(shared.rule, a, s), 5003, range(4)) > 100_000


def test_the_same_rules_give_the_same_datapath() -> None:
    first, second = (SharedRules("general", FOUR).rule.program.digest() for _ in range(2))
    assert first == second


def test_rules_that_do_not_fit_are_refused(four: SharedRules) -> None:
    with pytest.raises(ValueError, match="at least one"):
        SharedRules("none", [])
    with pytest.raises(RuleError, match="Two rules have the name 'adam'"):
        SharedRules("twice", [ADAM, ADAM])
    odd = Rule("odd", lambda p, *, m: {"p": p * m}, states=("p",), scalars=("m",))
    with pytest.raises(RuleError, match="'m' is a scalar here, and a state of another rule"):
        SharedRules("odd", [ADAM, odd])
    with pytest.raises(UnknownNameError, match="'lion'; declared: adam, sgd_momentum, sgd"):
        four.registers("lion", {})
    with pytest.raises(MissingScalarError, match="No value for decays"):
        four.registers("sgd", {"decay": 0.0, "step_size": 1.0})


@pytest.mark.deep
def test_area_of_four_rules_is_below_that_of_four_datapaths(four: SharedRules) -> None:
    def area(rule: Rule) -> dict[str, int]:
        cells = ultrascale_plus_cells(to_verilog(FunctionalUnit(rule), "unit"), "unit")
        kinds = {"DSP": "DSP48E2", "LUT": "LUT", "FF": "FD", "RAM": "RAM"}
        return {
            kind: sum(count for name, count in cells.items() if name.startswith(start))
            for kind, start in kinds.items()
        }

    together = area(four.rule)
    each = {rule.name: area(rule) for rule in FOUR}
    print(f"shared {together}; separate {each}")
    for kind in ("DSP", "LUT"):
        assert 0 < together[kind] < 0.75 * sum(one[kind] for one in each.values())
