"""Options of torch's optimizers: which mean the same here, and which are refused by name."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, MutableMapping
from typing import Any

import numpy as np
from torch import Tensor

from nearstep.torch.errors import (
    HyperparameterError,
    MissingOptionError,
    UnsupportedOptionError,
)

_REASONS = {
    "foreach": "the device walks over all parameters by itself",
    "capturable": "a step on a device cannot be captured in a CUDA graph",
    "differentiable": "autograd cannot see through a step on a device",
}

_IMPLEMENTATION = {"foreach": None, "capturable": False, "differentiable": False}
"""Options that choose how torch computes, not what: a checkpoint's choice is not taken over."""

_ABSENT = {
    "amsgrad": False,
    "maximize": False,
    "fused": None,
    "decoupled_weight_decay": False,
    "nesterov": False,
}
"""Options that groups saved by an older torch lack."""


def reject_unsupported(group: Mapping[str, Any]) -> None:
    """Raise :class:`UnsupportedOptionError` for the first option that is set but not supported."""
    for option, reason in _REASONS.items():
        if group.get(option):
            raise UnsupportedOptionError(option, group[option], reason)


def normalise(group: MutableMapping[str, Any], options: Container[str]) -> None:
    """Complete a loaded group with those of ``options`` that it lacks, and reset what it says about
    torch's way to compute."""
    group.update({name: value for name, value in _IMPLEMENTATION.items() if name in options})
    for name, value in _ABSENT.items():
        if name in options:
            group.setdefault(name, value)


def check_complete(group: Mapping[str, Any], options: Iterable[str]) -> None:
    """Raise :class:`MissingOptionError` for the first of ``options`` that a group lacks."""
    for option in options:
        if option not in group:
            raise MissingOptionError(option, group)


def check_not_negative(group: Mapping[str, Any], *names: str) -> None:
    """Raise :class:`HyperparameterError` unless these are finite numbers of at least 0."""
    for name in names:
        value = scalar(name, group[name])
        if not (value >= 0.0 and math.isfinite(value)):
            raise HyperparameterError(name, "finite and at least 0", group[name])


def check_betas(group: Mapping[str, Any]) -> None:
    """Raise :class:`HyperparameterError` unless both betas are in [0, 1)."""
    for name, value in zip(("betas[0]", "betas[1]"), beta_pair(group["betas"]), strict=True):
        if not 0.0 <= value < 1.0:
            raise HyperparameterError(name, "in [0, 1)", value)


def scalars(group: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """These hyper-parameters as Python floats, by name."""
    return {name: scalar(name, group[name]) for name in names}


def beta_pair(betas: object) -> tuple[float, float]:
    """Both betas as Python floats."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise HyperparameterError("betas", "a pair of numbers", betas)
    return scalar("betas[0]", betas[0]), scalar("betas[1]", betas[1])


def scalar(name: str, value: object) -> float:
    """``value`` as a Python float; a tensor must have one element. One too large is infinite.

    Raises
    ------
    HyperparameterError
        It is not a number.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
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
