# amaranth: UnusedElaboratable=no
"""numpy, C++ and RTL of every rule give the same bits."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_sim.bench.functional_unit import UnitRun, VerilatedUnit
from nearstep_sim.bench.operands import registers
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.golden.rule_cpp import kernel
from nearstep_spec.rule.rule import Rule

Arrays = dict[str, NDArray[np.float32]]
Operands = Callable[[Rule, int, int], Arrays]
OpenUnit = Callable[..., VerilatedUnit]
SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.deep) for seed in (2, 3))]


@pytest.fixture
def open_unit() -> Iterator[OpenUnit]:
    """Open Verilated units, and close them after the test."""
    opened: list[VerilatedUnit] = []

    def open_one(rule: Rule, *, lanes: int = 1, **options: object) -> VerilatedUnit:
        unit = FunctionalUnit(rule, **options)
        opened.append(VerilatedUnit(unit, lanes=lanes, cxxflags=["-O1"]))
        return opened[-1]

    yield open_one
    for unit in opened:
        unit.close()


DEEP = [
    pytest.param(name, marks=pytest.mark.deep)
    for name in ("adam", "adam_amsgrad", "sgd_momentum", "adagrad", "lion")
]


@pytest.fixture(params=["every_operation", *DEEP])
def built_rule(request: pytest.FixtureRequest, rules: dict[str, Rule]) -> Rule:
    """Rules whose units the fast tests build."""
    return rules[request.param]


def _scalars(rule: Rule, seed: int) -> dict[str, float]:
    return registers(dict(rule.registers()), seed)


def _differing(rule: Rule, got: Arrays, expected: Arrays) -> dict[str, int]:
    return {
        name: int(np.count_nonzero(got[name].view(np.uint32) != expected[name].view(np.uint32)))
        for name in rule.arrays_out
    }


def _check(rule: Rule, run: UnitRun, expected: Arrays) -> None:
    differing = _differing(rule, run.arrays, expected)
    checked = sum(array.size for array in expected.values())
    print(f"{rule.name}: {checked} results, differing: {differing}")
    assert (run.missing, run.extra, run.changes_while_idle) == (0, 0, 0)
    assert checked > 0
    assert not any(differing.values())


@pytest.mark.parametrize("seed", SEEDS)
def test_kernel_equals_numpy_model(rule: Rule, seed: int, operands: Operands) -> None:
    arrays = operands(rule, 500_003, seed)
    scalars = _scalars(rule, seed)
    expected = evaluate(rule, arrays, scalars)
    arrays |= {name: np.zeros(500_003, np.float32) for name in rule.outputs}
    kernel(rule)(arrays, scalars)
    assert not any(_differing(rule, arrays, expected).values())


@pytest.mark.parametrize("seed", SEEDS)
def test_unit_equals_numpy_model_at_full_rate(
    built_rule: Rule, seed: int, operands: Operands, open_unit: OpenUnit
) -> None:
    arrays = operands(built_rule, 260_003, seed)
    scalars = _scalars(built_rule, seed)
    unit = open_unit(built_rule)
    run = unit.run(arrays, scalars)
    _check(built_rule, run, evaluate(built_rule, arrays, scalars))
    assert run.latency == unit.unit.latency
    assert run.enabled_cycles == 260_003 + unit.unit.latency - 1


@pytest.mark.parametrize(("stall", "bubble"), [(0.5, 0.0), (0.0, 0.5), (0.3, 0.3), (0.9, 0.9)])
def test_unit_keeps_everything_through_stalls_and_bubbles(
    built_rule: Rule, stall: float, bubble: float, operands: Operands, open_unit: OpenUnit
) -> None:
    arrays = operands(built_rule, 20_003, 7)
    scalars = _scalars(built_rule, 2)
    run = open_unit(built_rule).run(arrays, scalars, stall=stall, bubble=bubble, seed=11)
    _check(built_rule, run, evaluate(built_rule, arrays, scalars))
    assert (run.idle_cycles > 0) == (stall > 0)
    assert (run.enabled_cycles > 21_000) == (bubble > 0)


_OPTIONS: dict[str, dict[str, object]] = {
    "default": {},
    "ecp5": {"technology": "ecp5"},
    "shift": {"delay": "shift"},
    "registered": {"register_inputs": True},
    "shallow": {"depths": {"add": 1, "sub": 2, "mul": 1, "fma": 1, "div": 1, "sqrt": 1}},
    "uneven": {"depths": {"add": 9, "sub": 3, "mul": 2, "fma": 11, "div": 20, "sqrt": 5, "max": 3}},
}


def _check_options(
    rule: Rule, options: dict[str, object], operands: Operands, open_unit: OpenUnit
) -> None:
    arrays = operands(rule, 20_003, 5)
    unit = open_unit(rule, **options)
    for seed in (0, 1):
        scalars = _scalars(rule, seed)
        expected = evaluate(rule, arrays, scalars)
        run = unit.run(arrays, scalars)
        _check(rule, run, expected)
        assert run.latency == unit.unit.latency
        _check(rule, unit.run(arrays, scalars, stall=0.3, bubble=0.3, seed=3), expected)


@pytest.mark.deep
def test_uneven_depths_change_no_result(
    every_operation: Rule, operands: Operands, open_unit: OpenUnit
) -> None:
    _check_options(every_operation, _OPTIONS["uneven"], operands, open_unit)


@pytest.mark.deep
@pytest.mark.parametrize("options", _OPTIONS.values(), ids=_OPTIONS)
def test_depths_and_delays_change_no_result(
    rule: Rule, options: dict[str, object], operands: Operands, open_unit: OpenUnit
) -> None:
    _check_options(rule, options, operands, open_unit)


@pytest.mark.deep
def test_unit_equals_numpy_model_on_ten_million_operands(
    rule: Rule, operands: Operands, open_unit: OpenUnit
) -> None:
    unit = open_unit(rule)
    for seed in range(100, 110):
        arrays = operands(rule, 1_000_000, seed)
        scalars = _scalars(rule, seed)
        _check(rule, unit.run(arrays, scalars), evaluate(rule, arrays, scalars))


@pytest.mark.parametrize("lanes", [1, pytest.param(3, marks=pytest.mark.deep)])
def test_units_run_again_with_other_scalars(
    built_rule: Rule, lanes: int, operands: Operands, open_unit: OpenUnit
) -> None:
    unit = open_unit(built_rule, lanes=lanes)
    for seed in (1, 0, 2):
        arrays = operands(built_rule, 1000 + seed, seed)
        scalars = _scalars(built_rule, seed)
        _check(built_rule, unit.run(arrays, scalars), evaluate(built_rule, arrays, scalars))


def test_comparison_sees_one_wrong_bit(
    every_operation: Rule, operands: Operands, open_unit: OpenUnit
) -> None:
    arrays = operands(every_operation, 1000, 0)
    scalars = _scalars(every_operation, 0)
    expected = evaluate(every_operation, arrays, scalars)
    run = open_unit(every_operation).run(arrays, scalars)
    _check(every_operation, run, expected)
    expected[every_operation.arrays_out[-1]].view(np.uint32)[999] ^= 1
    with pytest.raises(AssertionError):
        _check(every_operation, run, expected)
