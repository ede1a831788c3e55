"""Update rules from a file of the user's, with errors that name the line at fault."""

import importlib.util
import sys
import traceback
from pathlib import Path

from nearstep_hw.rule.errors import RuleError
from nearstep_hw.rule.rule import Rule

__all__ = ["RuleFileError", "load_rules"]


ORDER_HINT = "; the old value of a state is its parameter, the new one next_value('name')"


class RuleFileError(ValueError):
    """A file gives no rule; the message begins with the file, and the line where there is one."""


def load_rules(path: Path) -> dict[str, Rule]:
    """Every rule that the Python file at `path` defines, by its name.

    The file is run. Rules that it imports from elsewhere are left out.

    Raises
    ------
    RuleFileError
        The file cannot be read or run, or defines no rule, or two of one name.
    """
    if not path.is_file():
        raise RuleFileError(f"{path}: there is no such file")
    spec = importlib.util.spec_from_file_location("nearstep_rule_file", path)
    if spec is None or spec.loader is None:
        raise RuleFileError(f"{path}: a rule is written in a Python file, *.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except RuleError as error:
        raise RuleFileError(str(error)) from error
    except SyntaxError as error:
        raise RuleFileError(f"{error.filename}:{error.lineno}: {error.msg}") from error
    except Exception as error:
        # Whatever the file does wrong is told by the last of its own lines that ran.
        lines = [
            frame.lineno
            for frame in traceback.extract_tb(error.__traceback__)
            if Path(frame.filename).resolve() == path.resolve()
        ]
        at = f"{path}:{lines[-1]}" if lines else f"{path}"
        hint = ORDER_HINT if isinstance(error, UnboundLocalError) else ""
        raise RuleFileError(f"{at}: {type(error).__name__}: {error}{hint}") from error
    finally:
        del sys.modules[spec.name]
    return _own(path, vars(module))


def _own(path: Path, names: dict[str, object]) -> dict[str, Rule]:
    rules: dict[str, Rule] = {}
    for value in names.values():
        if not isinstance(value, Rule) or value in rules.values():
            continue
        if Path(value.location.file).resolve() != path.resolve():
            continue
        if value.name in rules:
            raise RuleFileError(
                f"{value.location}: rule {value.name!r} is defined twice, "
                f"first at {rules[value.name].location}"
            )
        rules[value.name] = value
    if not rules:
        raise RuleFileError(f"{path}: defines no rule; write NAME = Rule('name', function, ...)")
    return rules
