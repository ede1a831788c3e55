# amaranth: UnusedElaboratable=no
"""`nearstep rule check`: what it prints, and that it sees a unit that is wrong."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_sim import rule_check
from nearstep_sim.bench.operands import operands, registers
from nearstep_sim.bench.unit_port import beat_bound, run_on_port
from nearstep_sim.golden.rule import evaluate
from nearstep_spec.rule.file import load_rules

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def _run(*arguments: object):
    return CliRunner().invoke(rule_check.app, ["check", *(str(each) for each in arguments)])


def test_lion_is_exact_and_its_estimate_is_confirmed() -> None:
    result = _run(EXAMPLES / "lion.py", "--vectors", 40_000)
    assert result.exit_code == 0, result.output
    print(result.output)
    compared = re.search(r"0 of (\d+) results differ", result.output)
    assert compared
    assert int(compared[1]) >= 4 * 40_000
    for text in ("decay, update_weight, m_weight, step_size", "1 sub, 1 mul, 3 fma", "20 cycles",
                 "3.200 parameters a cycle", ", confirmed)"):  # fmt: skip
        assert text in result.output
    assert "in memory" not in result.output


@pytest.mark.deep
def test_states_of_16_bits_are_said_to_be_measured_at_binary32() -> None:
    result = _run(EXAMPLES / "adam_bf16.py")
    print(result.output)
    assert result.exit_code == 0, result.output
    assert len(re.findall(r"in memory .*fewer bytes", result.output)) == 2


@pytest.mark.deep
def test_rmsprop_with_area() -> None:
    result = _run(EXAMPLES / "rmsprop.py", "--area")
    print(result.output)
    assert result.exit_code == 0, result.output
    area = re.search(r"(\d+) DSP48E2, (\d+) LUT, (\d+) FF", result.output)
    assert area
    assert 0 < int(area[1]) <= 14
    assert min(int(area[2]), int(area[3])) > 1000


def test_wrong_arithmetic_is_seen_and_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def off_by_one(rule, arrays, scalars):
        results = evaluate(rule, arrays, scalars)
        results["m"].view("u4")[-1] ^= 1
        return results

    monkeypatch.setattr(rule_check, "evaluate", off_by_one)
    result = _run(EXAMPLES / "lion.py", "--vectors", 4000)
    assert result.exit_code == 1
    assert re.search(r"[1-9]\d* of \d+ results differ; RTL, element 999 \(p=0x", result.output)
    assert "NOT confirmed" in result.output


def test_a_mistake_ends_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from nearstep_spec.rule.rule import Rule\n"
        'MINE = Rule("mine", lambda p, g, *, lr: {"p": p - lr * g}, states=("p",), inputs=("g",))\n'
    )
    result = _run(path)
    assert result.exit_code == 2
    assert f"{path}:2: Unknown state, input, scalar or switch 'lr'" in result.output


def test_a_file_that_exits_has_failed(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("import sys\nsys.exit(0)\n")
    result = _run(path)
    assert result.exit_code == 2
    assert f"error: {path}:2: SystemExit: 0" in result.output


@pytest.mark.parametrize(("count", "block"), [(1, 4), (15, 4), (16 * 4 * 3 + 1, 4), (5000, 16)])
def test_units_behind_a_port_write_every_element_once_within_the_bound(
    count: int, block: int
) -> None:
    rule = load_rules(EXAMPLES / "lion.py")["lion"]
    unit = FunctionalUnit(rule)
    given = operands(rule.arrays_in, count, 3)
    scalars = registers(dict(rule.registers()), 3)
    run = run_on_port(unit, given, scalars, block_beats=block)
    expected = evaluate(rule, given, scalars)
    for name, array in expected.items():
        assert (run.arrays[name].view("u4") == array.view("u4")).all()
    bound = beat_bound(unit, count, lanes=16)
    assert run.busy_cycles == bound
    assert bound <= run.cycles <= bound + unit.latency + 6 * block + 8
