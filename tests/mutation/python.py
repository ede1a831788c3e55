"""Mutants of Python: another operator, constant or condition, or a statement that is left out."""

from __future__ import annotations

import ast
import gc
import importlib
import random
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

ROOT = Path(__file__).parents[2]
SWAPPED: dict[type[Any], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.LShift: ast.RShift,
    ast.RShift: ast.LShift, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
"""Each operator, and the one that replaces it."""
SKIPPED = (ast.Raise, ast.Assert, ast.JoinedStr, ast.arguments, ast.Import, ast.ImportFrom)
"""Their inside is not changed: texts of errors, and what a function does not run."""
LEFT_OUT = (ast.Raise, ast.AugAssign, ast.Delete)

Change = tuple[int, str, Callable[[], None]]


def nodes(tree: ast.AST, inside: bool = False) -> Iterator[ast.AST]:
    """Yield what the functions of a module run, in order."""
    function = isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef))
    if inside or function:
        yield tree
    if isinstance(tree, SKIPPED) or getattr(tree, "arg", None) == "strict":
        return  # the strict of zip asserts
    unread = ("decorator_list", "returns", "args", "annotation") if function else ("annotation",)
    for name, value in ast.iter_fields(tree):
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and name not in unread:
                yield from nodes(child, inside or function)


def changes(tree: ast.AST) -> Iterator[Change]:
    """Yield line, description and the function that changes the tree, of every change."""
    for node in nodes(tree):
        line = getattr(node, "lineno", 0)
        for name in ("op", "ops"):
            given = getattr(node, name, None)
            first, *rest = given if isinstance(given, list) else [given]
            other = SWAPPED.get(type(first))
            if other is not None and not isinstance(node, ast.AugAssign):
                label = f"{type(first).__name__} to {other.__name__}"
                made = [other(), *rest] if isinstance(given, list) else other()
                yield line, label, partial(setattr, node, name, made)
        if isinstance(node, (ast.If, ast.While, ast.IfExp)):
            negated = ast.UnaryOp(ast.Not(), node.test)
            yield line, "not", partial(setattr, node, "test", negated)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            value = not node.value if isinstance(node.value, bool) else node.value + 1
            yield line, f"{node.value} to {value}", partial(setattr, node, "value", value)
        for name in ("body", "orelse", "finalbody"):
            body = getattr(node, name, None)
            if not isinstance(body, list):
                continue
            for place, each in enumerate(body):
                called = isinstance(each, ast.Expr) and isinstance(each.value, ast.Call)
                state = isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Attribute)
                if called or state or isinstance(each, LEFT_OUT):
                    label = f"without `{ast.unparse(each).splitlines()[0][:60]}`"
                    skip = ast.copy_location(ast.Pass(), each)
                    yield each.lineno, label, partial(body.__setitem__, place, skip)


def codes(path: Path, number: int | None) -> dict[tuple[str, int], CodeType]:
    """The code of each function of a file by name and line, with one of its changes or none."""
    tree = ast.parse(path.read_text("utf-8"))
    if number is not None:
        list(changes(tree))[number][2]()
    found: dict[tuple[str, int], CodeType] = {}
    waiting = [compile(ast.fix_missing_locations(tree), str(path), "exec", dont_inherit=True)]
    while waiting:
        code = waiting.pop()
        found[code.co_qualname, code.co_firstlineno] = code
        waiting += [each for each in code.co_consts if isinstance(each, CodeType)]
    return found


class Sources:
    """Mutants of files, chosen at random; `commands` names each as file, line and change."""

    def __init__(self, patterns: str, *, count: int, seed: int) -> None:
        self.files = sorted(path for each in patterns.split() for path in ROOT.glob(each))
        sites = [
            (path, number, f"{path.relative_to(ROOT)}:{line} {label}")
            for path in self.files
            for number, (line, label, _) in enumerate(changes(ast.parse(path.read_text("utf-8"))))
        ]
        random.Random(seed).shuffle(sites)
        self._chosen: list[tuple[Path, dict[tuple[str, int], CodeType]]] = []
        self.commands: list[str] = []
        before = {path: codes(path, None) for path in self.files}
        for path, number, command in sites:
            if len(self.commands) == count:
                break
            made = codes(path, number)
            # A function keeps its closure.
            kept = {key: code.co_freevars for key, code in made.items()}
            if all(kept.get(key) == code.co_freevars for key, code in before[path].items()):
                self._chosen.append((path, made))
                self.commands.append(command)

    def load(self) -> None:
        """Import all files: a function that is not made yet would stay as it is."""
        for path in self.files:
            parts = path.relative_to(ROOT).with_suffix("").parts[1:]
            importlib.import_module(".".join(parts).removesuffix(".__init__"))

    def apply(self, number: int) -> None:
        """Change this process to mutant `number`, from 1; 0: none."""
        if not number:
            return
        path, made = self._chosen[number - 1]
        gc.unfreeze()
        changed = 0
        for each in gc.get_objects():
            if type(each) is FunctionType and each.__code__.co_filename == str(path):
                key: Any = (each.__code__.co_qualname, each.__code__.co_firstlineno)
                if key in made:
                    each.__code__ = made[key]
                    changed += 1
        assert changed, f"no function of {path} is loaded"
