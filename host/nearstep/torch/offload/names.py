"""The parameters of an engine by name, and the check that they have not changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from nearstep.torch.checks import check_memory, is_on_host_or_accelerator, label
from nearstep.torch.convert import FORMATS
from nearstep.torch.errors import ParameterError, UnsupportedOptionError
from nearstep.torch.offload.compute_copy import NOTHING, ComputeCopy, InPlace
from nearstep.torch.offload.errors import ChangedModelError
from nearstep.torch.offload.parameter import OffloadedParameter, waiting_copy
from nearstep.torch.optimizer import DeviceOptimizer
from nearstep.torch.unclaimed import unclaimed

Place = str | tuple[int, int]
"""Name of a parameter in the model, or its group and position in the optimizer, whose checkpoints
may change names."""


def _places(model: nn.Module, optimizer: DeviceOptimizer) -> Iterator[tuple[Place, Tensor]]:
    """Yield every place of each parameter of the model and of the optimizer."""
    yield from model.named_parameters(remove_duplicate=False)
    for index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            yield (index, position), parameter


class Names:
    """Parameters by name, in the order of the model, then of the optimizer.

    Attributes
    ----------
    parameters : first name of each parameter.
    device : device that layers compute on.
    flattened : weights of recurrent modules, which cuDNN has put into one memory a module.

    Raises
    ------
    ParameterError, UnsupportedOptionError
    """

    def __init__(self, model: nn.Module, optimizer: DeviceOptimizer) -> None:
        self._model = model
        self._optimizer = optimizer
        self._by_place = dict(_places(model, optimizer))
        parameters: dict[Tensor, str] = {}
        for place, parameter in self._by_place.items():
            parameters.setdefault(parameter, self._name(place))
        self.parameters: Mapping[Tensor, str] = parameters
        owned = {each for group in optimizer.param_groups for each in group["params"]}
        for parameter, name in parameters.items():
            _check(name, parameter, owned=parameter in owned)
            _check_waiting(name, parameter, optimizer)
        self.device = _one_device(parameters)
        # A parameter of `init` is in an extent of its own on the device.
        present = {p: name for p, name in parameters.items() if unclaimed(p) is None}
        self.flattened = _flattened(model)
        check_memory(present, parts=self.flattened)

    def separate(self) -> Callable[[], None]:
        """Copy each parameter of `flattened` to memory of its own, since parameters come and go one
        by one; return what undoes it."""
        before = [parameter.data for parameter in self.flattened]

        def assign(found: Iterable[Tensor]) -> None:
            with torch.no_grad():
                for parameter, data in zip(self.flattened, found, strict=True):
                    parameter.data = data

        assign(map(Tensor.clone, before))
        return partial(assign, before)

    def check(self) -> None:
        """Raise `ChangedModelError` if names or parameters have changed."""
        count = 0
        for place, parameter in _places(self._model, self._optimizer):
            count += 1
            known = self._by_place.get(place)
            if known is None:
                raise ChangedModelError(self._name(place), "added")
            if known is not parameter or not isinstance(parameter, OffloadedParameter):
                raise ChangedModelError(self._name(place), "replaced")
        if count != len(self._by_place):
            now = dict(_places(self._model, self._optimizer))
            gone = next(each for each in self._by_place if each not in now)
            raise ChangedModelError(self._name(gone), "removed")

    def _name(self, place: Place) -> str:
        if isinstance(place, str):
            return place
        index, position = place
        groups = self._optimizer.param_groups
        group = groups[index] if index < len(groups) else {}
        names = group.get("param_names", ())
        return label(group if position < len(names) else {}, index, position)


def _flattened(model: nn.Module) -> list[Tensor]:
    found: list[Tensor] = []
    for module in model.modules():
        weights = list(module.parameters(recurse=False)) if isinstance(module, nn.RNNBase) else []
        present = {each.untyped_storage()._cdata for each in weights if unclaimed(each) is None}
        found += weights if len(present) == 1 < len(weights) else []
    return found


def smallest_budget(model: nn.Module, names: Names, in_place: Mapping[Tensor, InPlace]) -> int:
    """Return the bytes of the smallest budget in which every module can use its own parameters at
    once and backward can make their gradients.

    Parameters
    ----------
    names : of all parameters; those in no module are used one at a time.
    in_place : accesses that are not charged, by parameter.
    """
    groups: list[list[Tensor]] = [list(each.parameters(recurse=False)) for each in model.modules()]
    groups += [[parameter] for parameter in names.parameters]
    flattened = {*names.flattened}

    def span(parameter: Tensor) -> int:
        size, stride = parameter.size(), parameter.stride()
        like = torch.empty_strided(size, stride, dtype=parameter.dtype, device="meta")
        return like.untyped_storage().nbytes()

    def needed(parameter: Tensor, in_place: InPlace) -> int:
        own = parameter.numel() * parameter.element_size()
        found = waiting_copy(parameter)
        held = span(parameter) if found is None else found.own_nbytes
        held = own if parameter in flattened else held
        held = 0 if in_place.forward and in_place.backward else held
        return held + (own if parameter.requires_grad and not in_place.spares_gradient else 0)

    return max(
        (sum(needed(each, in_place.get(each, NOTHING)) for each in group) for group in groups),
        default=0,
    )


def gradients_at_once(model: nn.Module, copies: Mapping[Tensor, ComputeCopy]) -> int:
    """Return the maximum bytes, over modules, of gradients of a module's own parameters on the
    compute device."""
    return max(
        sum(
            copies[each].gradient_bytes
            for each in module.parameters(recurse=False)
            if each.requires_grad
        )
        for module in model.modules()
    )


def _check(name: str, parameter: Tensor, *, owned: bool) -> None:
    if type(parameter) is not Parameter and unclaimed(parameter) is None:
        raise ParameterError(name, "of class Parameter", type(parameter).__name__)
    if not is_on_host_or_accelerator(parameter):
        raise ParameterError(name, "on the CPU or an accelerator", f"on {parameter.device}")
    if parameter.dtype not in FORMATS:
        raise ParameterError(name, f"of a dtype among {FORMATS}", parameter.dtype)
    if parameter.layout is not torch.strided:
        raise ParameterError(name, "dense", parameter.layout)
    if parameter.requires_grad and not owned:
        raise ParameterError(name, "frozen or in a group of the optimizer", "in no group")


def _check_waiting(name: str, parameter: Tensor, optimizer: DeviceOptimizer) -> None:
    found = unclaimed(parameter)
    if found is None or found.is_free(optimizer.device):
        return
    if optimizer.place_of(parameter) is not found.resident:
        raise ParameterError(
            name,
            "on the optimizer's device, where init has put it, and no other optimizer's "
            "(device=init.device)",
            f"on another ({found.device.url}), or another's",
        )


def _one_device(parameters: Mapping[Tensor, str]) -> torch.device:
    first = next(iter(parameters), None)
    device = torch.device("cpu") if first is None else first.device
    for parameter, name in parameters.items():
        if parameter.device != device:
            raise ParameterError(name, f"on {device}, as the first one", f"on {parameter.device}")
    return device


def check_optimizer(optimizer: object) -> DeviceOptimizer:
    """Return the optimizer, if it is supported by the engine.

    Raises
    ------
    ParameterError : the optimizer is not one of `nearstep.optim`.
    UnsupportedOptionError : the optimizer updates in backward by itself.
    """
    if not isinstance(optimizer, DeviceOptimizer):
        raise ParameterError("optimizer", "one of nearstep.optim", type(optimizer).__name__)
    if optimizer.settings.in_backward:
        reason = "the engine has the hooks: give nearstep.offload updates='in-backward'"
        raise UnsupportedOptionError("updates", "in-backward", reason)
    return optimizer
