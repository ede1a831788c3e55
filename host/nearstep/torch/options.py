"""Options of torch's optimizers: conversion, checks, and options that are not supported."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor

from nearstep.torch.errors import (
    ConflictingOptionsError,
    HyperparameterError,
    MissingOptionError,
    UnsupportedOptionError,
)

_REASONS = {
    "capturable": "a step on a device cannot be captured in a CUDA graph",
    "differentiable": "autograd cannot see through a step on a device",
}

_IMPLEMENTATION = {"foreach": None, "capturable": False, "differentiable": False}
"""Options that select an implementation in torch; values of a checkpoint are ignored."""

_ABSENT = {"maximize": False, "fused": None}
"""Options that groups saved by an older torch lack, with their defaults."""


def reject_unsupported(group: Mapping[str, Any]) -> None:
    """Raise `UnsupportedOptionError` for the first option that is set but not supported."""
    for option, reason in _REASONS.items():
        if group.get(option):
            raise UnsupportedOptionError(option, group[option], reason)


def check_given(defaults: Mapping[str, Any]) -> None:
    """Check the options of a constructor.

    Raises
    ------
    UnsupportedOptionError, ConflictingOptionsError
    """
    reject_unsupported(defaults)
    if defaults.get("fused") and defaults.get("foreach"):
        raise ConflictingOptionsError("fused", "foreach")


def normalise(group: MutableMapping[str, Any], options: Container[str]) -> None:
    """Add missing `options` to a loaded group, and reset options that select an implementation."""
    group.update({name: value for name, value in _IMPLEMENTATION.items() if name in options})
    for name, value in _ABSENT.items():
        if name in options:
            group.setdefault(name, value)


def check_complete(group: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raise `MissingOptionError` for the first of `options` that a group lacks.

    torch adds options that select an implementation to the defaults of every optimizer.
    """
    for option in options:
        if option not in group and option not in _IMPLEMENTATION:
            raise MissingOptionError(option, group)


def several(name: str, values: object, count: int) -> tuple[float, ...]:
    """Return a hyper-parameter of `count` numbers as Python floats."""
    if not isinstance(values, tuple | list) or len(values) != count:
        expected = "a pair of numbers" if count == 2 else f"{count} numbers"
        raise HyperparameterError(name, expected, values)
    return tuple(scalar(f"{name}[{index}]", each) for index, each in enumerate(values))


def given_betas(betas: object) -> tuple[float, ...]:
    """Return the betas of a constructor: both floats or both tensors, as in torch."""
    pair = several("betas", betas, 2)
    if isinstance(betas, tuple | list) and sum(isinstance(beta, Tensor) for beta in betas) == 1:
        raise HyperparameterError("betas", "either both floats or both Tensors", betas)
    return pair


def scalar(name: str, value: object) -> float:
    """Return `value` as a Python float, inf if too large; a tensor must have one element.

    Raises
    ------
    HyperparameterError : it is not a number.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.is_nested:
            raise HyperparameterError(name, "a number or a tensor of one element", value)
        number = value.item()
        if isinstance(number, complex):
            raise HyperparameterError(name, "a real number", number)
        return float(number)
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__float__"):
        raise HyperparameterError(name, "a number", value)
    if isinstance(value, np.complexfloating):
        raise HyperparameterError(name, "a real number", value)
    try:
        return float(value)
    except OverflowError:
        return math.inf
    except (TypeError, ValueError):
        raise HyperparameterError(name, "a number", value) from None
