# amaranth: UnusedElaboratable=no
"""Start times of operations: nothing early, least latency, few bits of delay."""

import pytest

from nearstep_hw.rule.rtl import DEFAULT_DEPTHS, FunctionalUnit
from nearstep_hw.rule.schedule import Schedule
from nearstep_spec.rule.adam import ADAM
from nearstep_spec.rule.rule import Rule

_LONG = {op: 3 + 2 * k for k, op in enumerate(DEFAULT_DEPTHS)}


@pytest.mark.parametrize("depths", [DEFAULT_DEPTHS, _LONG, {}], ids=["default", "long", "none"])
def test_no_operation_starts_before_its_operands_are_there(rule: Rule, depths) -> None:
    schedule = Schedule.of(rule.program, depths)
    checked = 0
    for index, each in enumerate(rule.program.operations):
        for operand in each.operands:
            if schedule.end[operand] is not None:
                assert schedule.end[operand] <= schedule.start[index]
                checked += 1
    for index in rule.program.results.values():
        assert (schedule.end[index] or 0) <= schedule.latency
    assert checked > 0


def test_latency_is_that_of_the_longest_path() -> None:
    depth = DEFAULT_DEPTHS
    path = ("fma", "sub", "fma") if depth["sub"] > depth["mul"] else ("fma", "mul", "fma")
    rest = ("sqrt", "div", "add", "div", "add")
    expected = sum(depth[op] for op in (*path, *rest))
    assert FunctionalUnit(ADAM).latency == expected <= 80


def test_operations_wait_where_that_saves_bits() -> None:
    def define(p, m, *, s):
        return {"p": s * m / (p / p / p), "m": m}

    rule = Rule("r", define, states=("p", "m"), scalars=("s",))
    schedule = Schedule.of(rule.program, {"mul": 2, "div": 10})
    assert schedule.latency == 30
    mul = next(k for k, each in enumerate(rule.program.operations) if each.op == "mul")
    # m is kept until the end anyway; s * m, started at 18, is not kept at all.
    assert schedule.start[mul] == 18
    # m for 30 cycles, p for 10 more after its first use.
    assert schedule.delay_bits(rule.program) == 32 * (30 + 10)


def test_outputs_that_are_only_wires_get_a_register() -> None:
    rule = Rule("r", lambda p, q: {"p": q, "q": -p}, states=("p", "q"))
    assert FunctionalUnit(rule).latency == 1


@pytest.mark.parametrize("depths", [{"divide": 3}, {"add": 0}, {"add": 2.0}])
def test_bad_depths_are_refused(depths) -> None:
    with pytest.raises(ValueError, match=r"Depth"):
        FunctionalUnit(ADAM, depths=depths)


def test_an_unknown_technology_is_refused() -> None:
    with pytest.raises(ValueError, match="one of ultrascale_plus, ecp5, not 'ice40'"):
        FunctionalUnit(ADAM, technology="ice40")
