"""Errors of a configuration in DeepSpeed's spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from nearstep.errors import ArgumentError, Fielded

AUTO = "auto"
"""Stands for a value that another program chooses."""


class ConfigError(Fielded, ArgumentError):
    """A configuration that cannot be followed. Nothing has been opened or made.

    Attributes
    ----------
    key : path of the key, such as `optimizer.params.lr`; empty for the whole.
    """

    template = "{name} must be {expected}, not {found}"
    key: str
    expected: str
    actual: object

    @property
    def name(self) -> str:
        return self.key or "the configuration"

    @property
    def found(self) -> str:
        return "missing" if self.actual is None else repr(self.actual)


class RepeatedKeyError(ConfigError):
    """A key that is given twice in one table."""

    def __init__(self, key: str) -> None:
        super().__init__(key, "given once", "given twice")


class UnknownKeyError(ConfigError):
    """A key that DeepSpeed's documentation does not have there.

    Attributes
    ----------
    near : similar known keys of that table; all of them if none is similar.
    """

    def __init__(self, key: str, known: Iterable[str]) -> None:
        name = key.rpartition(".")[2]
        every = tuple(known)
        self.near = tuple(difflib.get_close_matches(name, every, n=3, cutoff=0.4)) or every
        super().__init__(key, f"a known key: {', '.join(self.near)}", name)


class UnsupportedKeyError(ConfigError):
    """A key that DeepSpeed has, with a value that nearstep does not support."""

    template = "{name} must be {expected}, not {found}: {reason}"
    reason: str


class AutoValueError(ConfigError):
    """A value that is left to a trainer, and was not given."""

    def __init__(self, key: str) -> None:
        super().__init__(key, f"a value, or given: auto={{{key!r}: ...}}", AUTO)
