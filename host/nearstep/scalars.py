"""Checks of arguments that are whole numbers or truth values."""

from __future__ import annotations

import operator
from typing import Any, TypeGuard

import numpy as np

from nearstep.errors import ArgumentError


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number, of Python or numpy, and no truth value."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def index(value: Any) -> int:
    """`operator.index`, which here refuses truth values.

    Raises
    ------
    TypeError : `value` is no index.
    """
    if isinstance(value, bool | np.bool_):
        raise TypeError("a truth value is no index")
    return operator.index(value)


def flag(name: str, value: object) -> bool:
    """`value` as a bool; it must be a truth value of Python or numpy, no text such as `"no"`.

    Raises
    ------
    ArgumentError : `value` is none.
    """
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def check_whole(name: str, value: object, least: int) -> None:
    """Raise `ArgumentError` unless `value` is a whole number of at least `least`."""
    if not (is_whole(value) and value >= least):
        raise ArgumentError(f"{name} must be an integer from {least}, not {value!r}")
