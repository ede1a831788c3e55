"""Hooks on the modules of an offloaded model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from nearstep.torch.offload.parameter import OffloadedParameter


class Hook:
    """A hook that copies of the module, and pickled ones, have no use for: there it does nothing.

    Parameters
    ----------
    action : called with the module.
    """

    def __init__(self, action: Callable[[nn.Module], None] | None = None) -> None:
        self._action = action

    def __call__(self, module: nn.Module, *others: Any) -> None:
        if self._action is not None:
            self._action(module)

    def __deepcopy__(self, memo: dict[int, Any]) -> Hook:
        return Hook()

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, ()


def hook_modules(
    model: nn.Module, before_forward: Callable[[nn.Module], None]
) -> list[Callable[[], None]]:
    """Have `before_forward` called before the model's forward, and have `state_dict` copy
    parameters, one after the other.

    Returns
    -------
    list[Callable[[], None]] : what takes the hooks away.
    """
    handles: list[Any] = [model.register_forward_pre_hook(Hook(before_forward), prepend=True)]
    for module in model.modules():
        any_module: Any = module  # what follows has no types in torch
        handles.append(any_module.register_state_dict_pre_hook(Hook(_begin_saving)))
        handles.append(any_module._register_state_dict_hook(Hook(_end_saving)))
    return [handle.remove for handle in handles]


def check_modules(model: nn.Module) -> None:
    """Raise `TypeError` for modules whose parameters no hook of Python sees."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"module {name!r} must not be a compiled one, {type(module).__name__}")


def _own(module: nn.Module) -> list[OffloadedParameter]:
    return [each for each in module._parameters.values() if isinstance(each, OffloadedParameter)]


def _begin_saving(module: nn.Module) -> None:
    for each in _own(module):
        each.place.uses.saving.add(each.place.copy)


def _end_saving(module: nn.Module) -> None:
    for each in _own(module):
        each.place.uses.saving.discard(each.place.copy)
