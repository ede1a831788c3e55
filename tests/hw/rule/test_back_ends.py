"""numpy, C++ and RTL of every rule give the same bits."""

from collections.abc import Callable

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep_hw.rule.adam import ADAM
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.rule.rule import Rule
from nearstep_sim.bench.functional_unit import UnitRun, VerilatedUnit
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.golden.rule_cpp import kernel

Operands = Callable[[Rule, int, int], dict[str, NDArray[np.float32]]]


def _scalars(rule: Rule, seed: int) -> dict[str, float]:
    rng = np.random.default_rng(seed)
    return {
        name: int(rng.integers(2)) if width == 1 else float(np.float32(rng.normal()))
        for name, width in rule.registers().items()
    }


def _differing(
    rule: Rule, got: dict[str, NDArray[np.float32]], expected: dict[str, NDArray[np.float32]]
) -> int:
    return sum(
        int(np.count_nonzero(got[name].view(np.uint32) != expected[name].view(np.uint32)))
        for name in rule.arrays_out
    )


def _check_run(unit: VerilatedUnit, run: UnitRun, expected: dict[str, NDArray[np.float32]]) -> None:
    assert (run.missing, run.extra, run.changes_while_idle) == (0, 0, 0)
    assert _differing(unit.unit.rule, run.arrays, expected) == 0


@pytest.mark.parametrize("seed", range(4))
def test_kernel_equals_numpy_model(rule: Rule, seed: int, operands: Operands) -> None:
    arrays = operands(rule, 500_003, seed)
    scalars = _scalars(rule, seed)
    expected = evaluate(rule, arrays, scalars)
    shape = arrays[rule.arrays_in[0]].shape
    arrays |= {name: np.empty(shape, np.float32) for name in rule.outputs}
    kernel(rule)(arrays, scalars)
    assert _differing(rule, arrays, expected) == 0


@pytest.mark.parametrize("seed", range(4))
def test_unit_equals_numpy_model_at_full_rate(rule: Rule, seed: int, operands: Operands) -> None:
    arrays = operands(rule, 100_003, seed)
    scalars = _scalars(rule, seed)
    unit = VerilatedUnit(FunctionalUnit(rule))
    run = unit.run(arrays, scalars)
    _check_run(unit, run, evaluate(rule, arrays, scalars))
    assert run.latency == unit.unit.latency
    assert run.enabled_cycles == 100_003 + unit.unit.latency - 1
    unit.close()
