"""Rules from a user's file: the mistakes of a newcomer, each with its file and line."""

import re
from pathlib import Path

import pytest

from nearstep_spec.rule.file import RuleFileError, load_rules

HEAD = """\
from nearstep_spec.rule.expr import fma, next_value, select
from nearstep_spec.rule.rule import Rule

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
    text = path.read_text() + "from nearstep_spec.rule.adam import ADAM\nAGAIN = MINE\n"
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
    "unknown state, of a parameter as it came": (
        '    return {"p": p - lr * g, "v": m}',
        4,
        "'v'; declared: p, m",
    ),
    "tuple": ("    return p - lr * g, m", 4, "must return a mapping"),
    "exit": ("    import sys\n    sys.exit(0)", 6, "SystemExit: 0"),
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
    assert "nearstep_hw" not in str(caught.value)


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


def test_rules_that_the_file_makes_of_imported_ones_are_its_own(tmp_path: Path) -> None:
    (tmp_path / "nearstep_test_helper.py").write_text(
        "from nearstep_spec.rule.rule import Rule\n"
        'def down(p, g, *, lr):\n    return {"p": p - lr * g}\n'
        'THEIRS = Rule("theirs", down, states=("p",), inputs=("g",), scalars=("lr",))\n'
    )
    path = tmp_path / "mine.py"
    path.write_text(
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from nearstep_test_helper import THEIRS, down\n"
        "sys.path.pop(0)\n"
        "from nearstep_spec.rule.combine import combine\n"
        "from nearstep_spec.rule.rule import Rule\n"
        "from nearstep_spec.rule.rules import OPTIMIZERS as KNOWN\n"
        "from nearstep_spec.rule.sgd import SGD\n"
        "def rule(name):\n"
        '    return Rule(name, down, states=("p",), inputs=("g",), scalars=("lr",))\n'
        'MINE = rule("mine")\n'
        'BOTH = combine("both", [SGD, MINE])\n'
        'RULES = [rule("listed"), {"key": (rule("nested"), MINE)}]\n'
        "RULES.append(RULES)\n"
    )
    assert sorted(load_rules(path)) == ["both", "listed", "mine", "nested"]


def test_a_file_that_only_imports_rules_says_so(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("from nearstep_spec.rule.sgd import SGD, SGD_MOMENTUM\n")
    with pytest.raises(RuleFileError, match="of its own, it imports sgd, sgd_momentum; write"):
        load_rules(path)


NO_FUNCTIONS = {
    "partial": "functools.partial(_mine, lr=1.0)",
    "object": "functools.cache(_mine)",
    "number": "7",
}


@pytest.mark.parametrize("wrong", NO_FUNCTIONS)
def test_a_definition_that_is_no_function_is_told_with_file_and_line(
    wrong: str, tmp_path: Path
) -> None:
    path = _write(tmp_path)
    text = path.read_text().replace('"mine", _mine', f'"mine", {NO_FUNCTIONS[wrong]}')
    path.write_text("import functools\n" + text)
    with pytest.raises(RuleFileError, match="The definition must be a function, not") as caught:
        load_rules(path)
    assert str(caught.value).startswith(f"{path}:9: ")


def test_a_name_that_is_no_text_is_told_with_file_and_line(tmp_path: Path) -> None:
    path = _write(tmp_path)
    path.write_text(path.read_text().replace('"mine"', "7"))
    with pytest.raises(RuleFileError, match="must be an ASCII identifier, not 7") as caught:
        load_rules(path)
    assert str(caught.value).startswith(f"{path}:4: ")


def test_a_mistake_in_an_imported_function_names_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from nearstep_spec.rule.combine import combine\n"
        "from nearstep_spec.rule.rule import Rule\n"
        "from nearstep_spec.rule.scale import scaled\n"
        'TWICE = scaled(scaled(Rule("mine", lambda p, g: {"p": p + g}, states=("p",),\n'
        '               inputs=("g",))))\n'
    )
    with pytest.raises(RuleFileError, match=f"^{re.escape(str(path))}:4: .*scale.py:"):
        load_rules(path)


def test_what_is_no_text_is_refused_by_its_path(tmp_path: Path) -> None:
    (tmp_path / "nul.py").write_bytes(b"import math\n\0\n")
    with pytest.raises(RuleFileError, match=r"nul\.py: .*null bytes"):
        load_rules(tmp_path / "nul.py")
    (tmp_path / "folder.py").mkdir()
    with pytest.raises(RuleFileError, match="not in a directory"):
        load_rules(tmp_path / "folder.py")
