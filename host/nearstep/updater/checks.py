"""Checks of the numbers of a run, before anything is sent to a device."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from typing import TypeGuard

import numpy as np

from nearstep.errors import ArgumentError
from nearstep.scalars import is_whole

STEPS = 1 << 63
"""Limit of step counts, so that powers of the betas can be taken."""


def check_step(step: int) -> None:
    """Raise `ArgumentError` unless a step count is valid."""
    if not is_whole(step):
        raise ArgumentError(f"step must be an integer, not {step!r}")
    if not 1 <= step < STEPS:
        raise ArgumentError(f"step must be at least 1 and below 2**63, not {step}")


def check_scalars(scalars: Mapping[str, float | int], given: str) -> None:
    """Raise `ArgumentError` unless binary32 registers can hold the scalars of some arguments."""
    for name, value in scalars.items():
        with np.errstate(over="ignore"):
            fits = bool(np.isfinite(np.float32(value)))
        if not fits:
            raise ArgumentError(f"register {name} would overflow binary32 with {given}")


def real(name: str, value: object) -> float:
    """`value` as a float.

    Raises
    ------
    ArgumentError : it is no real number, but a text or a truth value, for example.
    """
    if not is_real(value):
        raise ArgumentError(f"{name} must be a number, not {value!r}")
    try:
        return float(value)
    except OverflowError:
        return math.inf


def is_real(value: object) -> TypeGuard[Real]:
    """Whether `value` is a real number, of Python or numpy; a truth value is none."""
    return isinstance(value, Real) and not isinstance(value, bool | np.bool_)
