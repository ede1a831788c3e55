"""Hooks on the modules of an offloaded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from nearstep.torch.errors import ParameterError
from nearstep.torch.module_hook import Hook
from nearstep.torch.offload.errors import TransformError
from nearstep.torch.offload.parameter import OffloadedParameter


def hook_modules(
    model: nn.Module, before_forward: Callable[[nn.Module], None]
) -> Iterator[Callable[[], None]]:
    """Call `before_forward` before the model's forward, and make `state_dict` copy parameters one
    at a time.

    Yields
    ------
    Callable[[], None] : removes a hook, as soon as it is there.
    """
    yield model.register_forward_pre_hook(_Hook(before_forward), prepend=True).remove
    for name, module in model.named_modules():
        if isinstance(module, nn.MultiheadAttention | nn.TransformerEncoderLayer):
            hook = _Hook(partial(_check_fast_path, name))
            yield module.register_forward_pre_hook(hook, prepend=True).remove
        elif module is not model and module._parameters:
            yield module.register_forward_pre_hook(_Hook()).remove
        any_module: Any = module  # what follows has no types in torch
        yield any_module.register_state_dict_pre_hook(Hook(_begin_saving)).remove
        yield any_module._register_state_dict_hook(Hook(_end_saving)).remove


class _Hook(Hook):
    """A hook that refuses `torch.jit.script` when it reads the hook's name: compiled code would
    compute with absent parameters."""

    @property
    def __name__(self) -> NoReturn:
        raise TransformError("torch.jit.script")


def _check_fast_path(name: str, module: nn.Module) -> None:
    """Raise `ParameterError` where torch would use its attention fast path with plain parameters:
    its bits differ, and it refuses tensor subclasses."""
    attention = getattr(module, "self_attn", module)
    if (
        module.training
        or not getattr(attention, "batch_first", False)
        or (torch.is_grad_enabled() and any(each.requires_grad for each in module.parameters()))
        or not torch.backends.mha.get_fastpath_enabled()
    ):
        return
    expected = (
        "evaluated without torch's fast path while offloaded "
        "(torch.backends.mha.set_fastpath_enabled(False), with equal bits in both)"
    )
    raise ParameterError(f"module {name!r}", expected, f"with it ({type(module).__name__})")


def check_modules(model: nn.Module) -> None:
    """Raise `ParameterError` for modules that do not look parameters up in Python."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            kind = type(module).__name__
            raise ParameterError(f"module {name!r}", "written in Python, not compiled", kind)


def _own(module: nn.Module) -> list[OffloadedParameter]:
    return [each for each in module._parameters.values() if isinstance(each, OffloadedParameter)]


def _begin_saving(module: nn.Module) -> None:
    for each in _own(module):
        each.copy.hooks.saving.add(each.copy)


def _end_saving(module: nn.Module) -> None:
    for each in _own(module):
        each.copy.hooks.saving.discard(each.copy)
