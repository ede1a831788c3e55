"""Kinds of values of keys, each with its check."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from nearstep.deepspeed.errors import ConfigError


class Kind(ABC):
    """A kind of values."""

    @property
    @abstractmethod
    def expected(self) -> str:
        """Description of the kind."""

    @abstractmethod
    def read(self, key: str, value: object) -> Any:
        """Check a value, and convert it for use.

        Raises
        ------
        ConfigError : the value is not of the kind.
        """

    def wrong(self, key: str, value: object) -> ConfigError:
        """The error of a wrong value; null is a value."""
        return ConfigError(key, self.expected, "null" if value is None else value)


class Switch(Kind):
    """A truth value."""

    @property
    def expected(self) -> str:
        return "true or false"

    def read(self, key: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise self.wrong(key, value)
        return value


@dataclass(frozen=True)
class Whole(Kind):
    """An integer, which may be written as `1e9`.

    Attributes
    ----------
    least, most : most is None for no bound.
    """

    least: int = 0
    most: int | None = None

    @property
    def expected(self) -> str:
        if self.most is not None:
            return f"a whole number from {self.least} to {self.most}"
        return f"a whole number of at least {self.least}"

    def read(self, key: str, value: object) -> int:
        if not _is_number(value) or value != int(value):
            raise self.wrong(key, value)
        whole = int(value)
        if whole < self.least or (self.most is not None and whole > self.most):
            raise self.wrong(key, value)
        return whole


@dataclass(frozen=True)
class Number(Kind):
    """A finite number of at least `least`, and less than `below`."""

    least: float = 0.0
    below: float = math.inf

    @property
    def expected(self) -> str:
        above = "" if math.isinf(self.below) else f" and below {self.below:g}"
        return f"a finite number of at least {self.least:g}{above}"

    def read(self, key: str, value: object) -> float:
        if not _is_number(value) or not self.least <= value < self.below:
            raise self.wrong(key, value)
        return float(value)


@dataclass(frozen=True)
class Several(Kind):
    """A list of numbers."""

    each: Number
    count: int

    @property
    def expected(self) -> str:
        return f"a list of {self.count} numbers"

    def read(self, key: str, value: object) -> tuple[float, ...]:
        if not isinstance(value, list | tuple) or len(value) != self.count:
            raise self.wrong(key, value)
        return tuple(self.each.read(f"{key}[{i}]", each) for i, each in enumerate(value))


@dataclass(frozen=True)
class Text(Kind):
    """A text.

    Attributes
    ----------
    choices : the allowed texts, in any case; none allows any that is not empty.
    """

    choices: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        return f"one of {', '.join(self.choices)}" if self.choices else "a text"

    def read(self, key: str, value: object) -> str:
        if not isinstance(value, str) or not value or "\0" in value:
            raise self.wrong(key, value)
        if not self.choices:
            return value
        for choice in self.choices:
            if choice.lower() == value.lower():
                return choice
        raise self.wrong(key, value)


@dataclass(frozen=True)
class OrNull(Kind):
    """A value, or null."""

    kind: Kind

    @property
    def expected(self) -> str:
        return f"{self.kind.expected}, or null"

    def read(self, key: str, value: object) -> Any:
        if value is None:
            return None
        try:
            return self.kind.read(key, value)
        except ConfigError:
            raise self.wrong(key, value) from None


class Table(Kind):
    """A table whose keys are not examined."""

    @property
    def expected(self) -> str:
        return "a table"

    def read(self, key: str, value: object) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise self.wrong(key, value)
        return value


def _is_number(value: object) -> TypeGuard[int | float]:
    """Whether a value is a finite number of binary64, and no truth value."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
