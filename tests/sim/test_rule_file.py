"""Rules from a user's file: the mistakes of a newcomer, each with its file and line."""

from pathlib import Path

import pytest

from nearstep_sim.rule_file import RuleFileError, load_rules

HEAD = """\
from nearstep_hw.rule.expr import fma, next_value, select
from nearstep_hw.rule.rule import Rule

def _mine(p, g, m, *, lr):
{body}

MINE = Rule("mine", _mine, states=("p", "m"), inputs=("g",), scalars={scalars})
"""
GOOD = '    m = m + g\n    return {"p": fma(lr, m, p), "m": m}'
BODY_LINE = 5


def _write(folder: Path, body: str = GOOD, scalars: str = '("lr",)') -> Path:
    path = folder / "mine.py"
    path.write_text(HEAD.format(body=body, scalars=scalars))
    return path


def test_every_rule_of_the_file_is_found_and_imported_ones_are_not(tmp_path: Path) -> None:
    path = _write(tmp_path)
    text = path.read_text() + "from nearstep_hw.rule.adam import ADAM\nAGAIN = MINE\n"
    path.write_text(text)
    rules = load_rules(path)
    assert list(rules) == ["mine"]
    assert rules["mine"].units() == {"add": 1, "fma": 1}


MISTAKES = {
    "unknown state": (
        '    return {"p": p, "m": m,\n        "q": lr * g}',
        6,
        "'q'; declared: p, m",
    ),
    "unknown name": ('    return {"p": p - lr * momentum, "m": g}', 5, "'momentum'"),
    "cycle": (
        '    x = lr * next_value("m")\n    return {"p": g, "m": p + x}',
        5,
        "depends on itself",
    ),
    "use before assignment": (
        '    m = old + g\n    old = m\n    return {"p": p - lr * g, "m": m}',
        5,
        "next_value('name')",
    ),
    "unassigned state": ('    return {"p": fma(lr, g, p)}', 4, "Nothing is assigned to m"),
    "condition": ('    if g > 0:\n        m = m\n    return {"p": p, "m": m}', 5, "select("),
    "operands": ('    return {"p": p, "m": fma(lr, m)}', 5, "TypeError"),
    "unused scalar": ('    return {"p": p + g, "m": m}', 4, "'lr' is declared but not used"),
    "syntax": ('    return {"p": p + g, "m": m', 5, "never closed"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_is_told_with_file_and_line(mistake: str, tmp_path: Path) -> None:
    body, line, text = MISTAKES[mistake]
    path = _write(tmp_path, body)
    with pytest.raises(RuleFileError) as caught:
        load_rules(path)
    assert str(caught.value).startswith(f"{path}:{line}: ")
    assert text in str(caught.value)


def test_missing_scalar_is_told_with_file_and_line(tmp_path: Path) -> None:
    path = _write(tmp_path, scalars="()")
    with pytest.raises(
        RuleFileError, match="Unknown state, input, scalar or switch 'lr'"
    ) as caught:
        load_rules(path)
    assert str(caught.value).startswith(f"{path}:4: ")


def test_scalar_that_the_definition_does_not_take_is_told_with_file_and_line(
    tmp_path: Path,
) -> None:
    path = _write(tmp_path, scalars='("lr", "decay")')
    with pytest.raises(RuleFileError, match="'decay' is declared but is no parameter") as caught:
        load_rules(path)
    assert str(caught.value).startswith(f"{path}:4: ")


def test_files_without_rules_are_refused(tmp_path: Path) -> None:
    with pytest.raises(RuleFileError, match="there is no such file"):
        load_rules(tmp_path / "none.py")
    (tmp_path / "empty.py").write_text("import math\n")
    with pytest.raises(RuleFileError, match="defines no rule"):
        load_rules(tmp_path / "empty.py")
    (tmp_path / "rule.txt").write_text("")
    with pytest.raises(RuleFileError, match="Python file"):
        load_rules(tmp_path / "rule.txt")
    path = _write(tmp_path)
    path.write_text(
        path.read_text() + 'TWO = Rule("mine", lambda p: {"p": p + 1.0}, states=("p",))\n'
    )
    with pytest.raises(RuleFileError, match=r"'mine' is defined twice, first at .*mine.py:4"):
        load_rules(path)
