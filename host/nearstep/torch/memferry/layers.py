"""The planner's layers of a module of torch: modules that have parameters of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from nearstep.errors import ArgumentError
from nearstep.memferry.profile import fingerprint

ROOT = "(model)"
"""Name of the layer of the model's own parameters, in no submodule."""


def model_fingerprint(model: nn.Module) -> str:
    """Return the fingerprint of a model's parameters: name, shape and dtype, in order.

    A tied parameter has one name.

    Returns
    -------
    str : as `nearstep.memferry.profile.fingerprint` returns.
    """
    return fingerprint(
        (name, tuple(each.shape), str(each.dtype).removeprefix("torch."))
        for name, each in model.named_parameters()
    )


@dataclass(frozen=True)
class ModuleLayer:
    """A module with parameters of its own.

    Attributes
    ----------
    name : first name of the module in the model; `ROOT` for the model itself.
    parameters : parameters of the module itself, not of submodules.
    """

    name: str
    module: nn.Module
    parameters: Sequence[Tensor]

    @property
    def is_leaf(self) -> bool:
        """Whether the module has no submodules."""
        return next(self.module.children(), None) is None


def layers_of(model: nn.Module) -> Mapping[str, ModuleLayer]:
    """Return the layers by name, in order of registration; a shared module is listed once.

    Raises
    ------
    ArgumentError : `model` is no module, or has no parameters.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    found = {}
    for name, module in model.named_modules():
        own = [*dict.fromkeys(module.parameters(recurse=False))]
        if own:
            found[name or ROOT] = ModuleLayer(name or ROOT, module, own)
    if not found:
        raise ArgumentError(f"model must have parameters, {type(model).__name__} has none")
    return found
