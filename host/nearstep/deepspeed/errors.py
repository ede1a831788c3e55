"""What can be wrong with a configuration in DeepSpeed's spelling."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from nearstep.errors import ArgumentError

AUTO = "auto"
"""What stands for a value that another program is to find."""


class ConfigError(ArgumentError):
    """A configuration that cannot be followed. Nothing has been opened or made.

    Attributes
    ----------
    key : path of the key, such as `optimizer.params.lr`; empty for the whole.
    expected, actual
    """

    def __init__(self, key: str, expected: str, actual: object) -> None:
        self.key = key
        self.expected = expected
        self.actual = actual
        found = "missing" if actual is None else repr(actual)
        super().__init__(f"{key or 'the configuration'} must be {expected}, not {found}")


class RepeatedKeyError(ConfigError):
    """A key that stands twice in one table."""

    def __init__(self, key: str) -> None:
        super().__init__(key, "given once", "given twice")


class UnknownKeyError(ConfigError):
    """A key that DeepSpeed's documentation does not have there.

    Attributes
    ----------
    near : the known keys of that table that look most like it; all of them if none does.
    """

    def __init__(self, key: str, known: Iterable[str]) -> None:
        name = key.rpartition(".")[2]
        every = tuple(known)
        self.near = tuple(difflib.get_close_matches(name, every, n=3, cutoff=0.4)) or every
        super().__init__(key, f"a known key: {', '.join(self.near)}", name)


class UnsupportedKeyError(ConfigError):
    """A key that DeepSpeed has, with a value that nothing here does.

    Attributes
    ----------
    reason
    """

    def __init__(self, key: str, expected: str, actual: object, reason: str) -> None:
        super().__init__(key, expected, actual)
        self.reason = reason
        self.args = (f"{self.args[0]}: {reason}",)


class AutoValueError(ConfigError):
    """A value that is left to a trainer, and was not given."""

    def __init__(self, key: str) -> None:
        super().__init__(key, f"a value, or given: auto={{{key!r}: ...}}", AUTO)
