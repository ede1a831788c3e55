"""Which values are whole numbers and truth values, as arguments."""

from __future__ import annotations

import operator
from typing import Any, TypeGuard

import numpy as np

from nearstep.errors import ArgumentError


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number, of Python or numpy; a truth value is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def index(value: Any) -> int:
    """`value` as an index, as `operator.index` has it; a truth value is none.

    Raises
    ------
    TypeError : it is none.
    """
    if isinstance(value, bool | np.bool_):
        raise TypeError("a truth value is no index")
    return operator.index(value)


def flag(name: str, value: object) -> bool:
    """`value` if it is a truth value, of Python or numpy: a text, such as `"no"`, is none.

    Raises
    ------
    ArgumentError : it is none.
    """
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{name} must be True or False, not {value!r}")
    return bool(value)


def check_whole(name: str, value: object, least: int) -> None:
    """Refuse what is no whole number from `least`.

    Raises
    ------
    ArgumentError : it is none.
    """
    if not (is_whole(value) and value >= least):
        raise ArgumentError(f"{name} must be an integer from {least}, not {value!r}")
