"""Rules and optimizers from a user's file, with errors that name the line at fault."""

import hashlib
import importlib.util
import sys
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType, ModuleType

from nearstep_spec.errors import NearstepError
from nearstep_spec.rule.errors import RuleError
from nearstep_spec.rule.optimizer import Optimizer
from nearstep_spec.rule.rule import Rule

__all__ = ["RuleFileError", "definitions", "is_in_file", "load", "load_rules", "load_with_digest"]

SUFFIX = ".py"
ORDER_HINT = "; the old value of a state is its parameter, the new one next_value('name')"


class RuleFileError(NearstepError, ValueError):
    """A file cannot be run or has no such rule; the message begins with file and known line."""


def is_in_file(name: str) -> bool:
    """Whether the name of a rule or an optimizer refers to a file: `FILE.py:NAME`."""
    return ":" in name or name.endswith(SUFFIX)


def load(name: str) -> Optimizer:
    """Load the optimizer `FILE.py:NAME`; a rule is converted by `.Optimizer.of_rule`.

    The file is executed, once for the same contents.

    Raises
    ------
    RuleFileError : the name is not of that form, the file cannot be read or run, or has no such
        optimizer.
    """
    return load_with_digest(name)[0]


def load_with_digest(name: str) -> tuple[Optimizer, str]:
    """Load as `load` does, and return the SHA-256 of the file's text in hex, since `scalars` may
    call anything in the file; empty for a rule, which has no `scalars`.

    Modules that the file imports are not included in the digest.

    Raises
    ------
    RuleFileError : as of `load`.
    """
    path, wanted, content, names = definitions(name, "a rule")
    found = names.get(wanted)
    if isinstance(found, Rule):
        return Optimizer.of_rule(found), ""
    if not isinstance(found, Optimizer):
        there = [each for each, value in names.items() if isinstance(value, Rule | Optimizer)]
        what = f"a {type(found).__name__}" if wanted in names else "not there"
        raise RuleFileError(
            f"{path}: {wanted} must be an Optimizer or a Rule, and is {what}; "
            f"there are: {', '.join(there) or 'none'}"
        )
    return found, hashlib.sha256(content).hexdigest()


def definitions(name: str, what: str) -> tuple[Path, str, bytes, Mapping[str, object]]:
    """Split `FILE.py:NAME` into file and name, and return the file's contents and definitions.

    The file is executed, once for the same contents; `what` names the wanted object in errors.

    Raises
    ------
    RuleFileError : the name is not of that form, or the file cannot be read or run.
    """
    text, _, wanted = name.rpartition(":")
    path = Path(text)
    if path.suffix != SUFFIX or not wanted.isidentifier():
        raise RuleFileError(f"{name}: {what} in a file is named FILE.py:NAME")
    content = path.read_bytes() if path.is_file() else b""
    return path, wanted, content, _names(path.resolve(), path, hashlib.sha256(content).digest())


@lru_cache(maxsize=64)
def _names(resolved: Path, path: Path, content: bytes) -> Mapping[str, object]:
    """Execute a file with this content and return its definitions; `path` is its name in errors."""
    return _run(path)


def load_rules(path: Path) -> dict[str, Rule]:
    """Collect every rule of the Python file at `path`, by name: named ones, those of its
    optimizers, and those in its lists, tuples and dicts.

    The file is executed. Imported rules, which have a name in another module, are omitted.

    Raises
    ------
    RuleFileError : the file cannot be read or run, or defines no rule, or two of one name.
    """
    return _own(path, _run(path))


def _run(path: Path) -> dict[str, object]:
    """Execute a file and return its names."""
    if path.is_dir():
        raise RuleFileError(f"{path}: a rule is written in a Python file, not in a directory")
    if not path.is_file():
        raise RuleFileError(f"{path}: there is no such file")
    spec = importlib.util.spec_from_file_location("nearstep_rule_file", path)
    if spec is None or spec.loader is None:
        raise RuleFileError(f"{path}: a rule is written in a Python file, *.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        # Not by the loader, whose cache ignores a change within a second that keeps the size.
        exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except RuleError as error:
        elsewhere = Path(error.location.file).resolve() != path.resolve()
        before = f"{_last_line(path, error)}: " if elsewhere else ""
        raise RuleFileError(f"{before}{error}") from error
    except SyntaxError as error:
        at = f"{path}" if error.lineno is None else f"{error.filename}:{error.lineno}"
        raise RuleFileError(f"{at}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        hint = ORDER_HINT if isinstance(error, UnboundLocalError) else ""
        raise RuleFileError(
            f"{_last_line(path, error)}: {type(error).__name__}: {error}{hint}"
        ) from error
    finally:
        del sys.modules[spec.name]
    return vars(module)


def _last_line(path: Path, error: BaseException) -> str:
    """Return the last executed line of the file at `path`, for errors."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if Path(frame.filename).resolve() == path.resolve()
    ]
    return f"{path}:{lines[-1]}" if lines else f"{path}"


def _own(path: Path, names: dict[str, object]) -> dict[str, Rule]:
    imported = {
        id(rule)
        for module in tuple(sys.modules.values())
        if isinstance(module, ModuleType)
        for value in tuple(vars(module).values())
        if issubclass(type(value), Rule | Optimizer)
        for rule in _rules_in(value)
    }
    rules: dict[str, Rule] = {}
    left_out: dict[str, None] = {}
    for value in _rules_in(tuple(names.values())):
        if value in rules.values():
            continue
        if id(value) in imported:
            left_out[value.name] = None
            continue
        if value.name in rules:
            raise RuleFileError(
                f"{value.location}: rule {value.name!r} is defined twice, "
                f"first at {rules[value.name].location}"
            )
        rules[value.name] = value
    if not rules:
        aside = f" of its own, it imports {', '.join(left_out)}" if left_out else ""
        raise RuleFileError(
            f"{path}: defines no rule{aside}; write NAME = Rule('name', function, ...)"
        )
    return rules


def _rules_in(value: object) -> Iterator[Rule]:
    """Yield rules in lists, tuples and dicts, recursively."""
    pending, seen = deque([value]), set[int]()
    while pending:
        each = pending.popleft()
        if isinstance(each, Rule):
            yield each
        elif isinstance(each, Optimizer):
            pending.extend(form.rule for form in each.all_forms)
        elif isinstance(each, list | tuple | dict | MappingProxyType) and id(each) not in seen:
            seen.add(id(each))
            pending.extend(each if isinstance(each, list | tuple) else each.values())
