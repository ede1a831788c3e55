"""Options of torch's Adam and AdamW: which mean the same here, and which are refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any

from torch import Tensor

from nearstep.torch.errors import HyperparameterError, UnsupportedOptionError

_REASONS = {
    "amsgrad": "the kernel keeps no running maximum of exp_avg_sq",
    "maximize": "the kernel descends; negate the loss instead",
    "foreach": "the device walks over all parameters by itself",
    "capturable": "a step on a device cannot be captured in a CUDA graph",
    "differentiable": "autograd cannot see through a step on a device",
}

_IMPLEMENTATION = {"foreach": None, "capturable": False, "differentiable": False}
"""Options that choose how torch computes, not what: a checkpoint's choice is not taken over."""

_ABSENT = {"amsgrad": False, "maximize": False, "fused": None, "decoupled_weight_decay": False}
"""Options that groups saved by an older torch lack."""


def reject_unsupported(group: Mapping[str, Any]) -> None:
    """Raise :class:`UnsupportedOptionError` for the first option that is set but not supported."""
    for option, reason in _REASONS.items():
        if group.get(option):
            raise UnsupportedOptionError(option, group[option], reason)


def normalise(group: MutableMapping[str, Any]) -> None:
    """Complete a loaded group, and reset what it says about torch's way to compute."""
    group.update(_IMPLEMENTATION)
    for option, value in _ABSENT.items():
        group.setdefault(option, value)


def hyperparameters(group: Mapping[str, Any]) -> dict[str, Any]:
    """What one step needs from a group, as Python numbers.

    Raises
    ------
    HyperparameterError
    """
    check_hyperparameters(group)
    return {
        "lr": scalar("lr", group["lr"]),
        "betas": beta_pair(group["betas"]),
        "eps": scalar("eps", group["eps"]),
        "weight_decay": scalar("weight_decay", group["weight_decay"]),
        "decoupled": bool(group["decoupled_weight_decay"]),
    }


def check_hyperparameters(group: Mapping[str, Any]) -> None:
    """Raise :class:`HyperparameterError` for what ``torch.optim.Adam`` refuses."""
    for name in ("lr", "eps", "weight_decay"):
        value = scalar(name, group[name])
        if not (value >= 0.0 and math.isfinite(value)):
            raise HyperparameterError(name, "finite and at least 0", group[name])
    for name, value in zip(("betas[0]", "betas[1]"), beta_pair(group["betas"]), strict=True):
        if not 0.0 <= value < 1.0:
            raise HyperparameterError(name, "in [0, 1)", value)


def beta_pair(betas: object) -> tuple[float, float]:
    """Both betas as Python floats."""
    if not isinstance(betas, tuple | list) or len(betas) != 2:
        raise HyperparameterError("betas", "a pair of numbers", betas)
    return scalar("betas[0]", betas[0]), scalar("betas[1]", betas[1])


def scalar(name: str, value: object) -> float:
    """``value`` as a Python float; a tensor must have one element.

    Raises
    ------
    HyperparameterError
        It is not a number.
    """
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise HyperparameterError(name, "a number or a tensor of one element", value)
        return float(value.item())
    if isinstance(value, bool) or not hasattr(value, "__float__"):
        raise HyperparameterError(name, "a number", value)
    return float(value)
