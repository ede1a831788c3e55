"""Kinds of values of keys, each with its check."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from nearstep.deepspeed.errors import ConfigError

_WRONG = object()


@dataclass(frozen=True)
class Kind:
    """A kind of values.

    Attributes
    ----------
    convert : returns the value of a key for use, or `_WRONG`.
    """

    expected: str
    convert: Callable[[str, object], Any]

    def read(self, key: str, value: object) -> Any:
        """Check a value, and convert it for use; null is a value.

        Raises
        ------
        ConfigError : the value is not of the kind.
        """
        found = self.convert(key, value)
        if found is _WRONG:
            raise ConfigError(key, self.expected, "null" if value is None else value)
        return found


SWITCH = Kind("true or false", lambda _, value: value if isinstance(value, bool) else _WRONG)

TABLE = Kind("a table", lambda _, value: value if isinstance(value, Mapping) else _WRONG)
"""A table whose keys are not examined."""


def whole(least: int = 0, most: int | None = None) -> Kind:
    """An integer, which may be written as `1e9`, of at least `least` and at most `most`."""

    def convert(_: str, value: object) -> Any:
        if not _is_number(value) or value != int(value) or value < least:
            return _WRONG
        return int(value) if most is None or value <= most else _WRONG

    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    return Kind(f"a whole number {bounds}", convert)


def number(least: float = 0.0, below: float = math.inf) -> Kind:
    """A finite number of at least `least`, and less than `below`."""

    def convert(_: str, value: object) -> Any:
        return float(value) if _is_number(value) and least <= value < below else _WRONG

    above = "" if math.isinf(below) else f" and below {below:g}"
    return Kind(f"a finite number of at least {least:g}{above}", convert)


def several(each: Kind, count: int) -> Kind:
    """A list of numbers."""

    def convert(key: str, value: object) -> Any:
        if not isinstance(value, list | tuple) or len(value) != count:
            return _WRONG
        return tuple(each.read(f"{key}[{i}]", found) for i, found in enumerate(value))

    return Kind(f"a list of {count} numbers", convert)


def text(*choices: str) -> Kind:
    """One of these texts, in any case; without choices any that is not empty."""

    def convert(_: str, value: object) -> Any:
        if not isinstance(value, str) or not value or "\0" in value:
            return _WRONG
        same = (each for each in choices if each.lower() == value.lower())
        return next(same, _WRONG) if choices else value

    return Kind(f"one of {', '.join(choices)}" if choices else "a text", convert)


def or_null(kind: Kind) -> Kind:
    """A value of a kind, or null."""

    def convert(key: str, value: object) -> Any:
        return None if value is None else kind.convert(key, value)

    return Kind(f"{kind.expected}, or null", convert)


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number of binary64, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
