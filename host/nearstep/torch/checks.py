"""Checks of parameters and gradients before anything is sent to a device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch.nn.parameter import Parameter, is_lazy

from nearstep.torch.convert import FORMATS
from nearstep.torch.dtensor import is_partial, local, on_same_mesh, sharding
from nearstep.torch.errors import GradientError, ParameterError

_PLAIN, _STRIDED = {Parameter, Tensor}, {torch.strided}
_DTYPE, _LAYOUT, _IS_CPU, _IS_NESTED = map(attrgetter, ("dtype", "layout", "is_cpu", "is_nested"))
_NAMES = ", ".join(str(dtype).removeprefix("torch.") for dtype in FORMATS)


def label(group: Mapping[str, Any], group_index: int, index: int) -> str:
    """What to call a parameter in errors: the name that the user gave it, else its place."""
    names = group.get("param_names")
    return f"parameter {names[index] if names else index} of group {group_index}"


def is_on_host_or_accelerator(tensor: Tensor) -> bool:
    """Whether a tensor is in memory that can be copied to the host's, or is the host's."""
    if tensor.is_cpu:
        return True
    accelerator = torch.accelerator.current_accelerator()
    return accelerator is not None and tensor.device.type == accelerator.type


def is_plain(tensor: Tensor, dtype: torch.dtype = torch.float32) -> bool:
    """Whether this is a tensor as they usually are, of a dtype and contiguous, which no check
    refuses."""
    return (
        (type(tensor) is Parameter or type(tensor) is Tensor)
        and tensor.dtype is dtype
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and tensor.is_cpu
        and tensor.is_contiguous()
    )


def are_plain(tensors: Sequence[Tensor], dtype: torch.dtype) -> bool:
    """Whether each tensor is plain (`is_plain`), property by property: faster for many tensors."""
    return (
        _PLAIN.issuperset(map(type, tensors))
        and {dtype}.issuperset(map(_DTYPE, tensors))
        and _STRIDED.issuperset(map(_LAYOUT, tensors))
        and not any_nested(tensors)
        and all(map(_IS_CPU, tensors))
        and all(map(Tensor.is_contiguous, tensors))
    )


def any_nested(tensors: Iterable[Any]) -> bool:
    """Whether any of these is a nested tensor, or no tensor."""
    try:
        return any(map(_IS_NESTED, tensors))
    except AttributeError:
        return True


class KnownTensors:
    """Tensors that passed a check, which others like them need not pass again.

    Tensors are alike if types, dtypes, layouts, devices, shapes, strides, negation and
    `requires_grad` are equal, which `torch.compile`'s guards compare in one call. Nested tensors
    would end the process.
    """

    MOST = 1 << 18
    """Tensors to compare with, of 141 bytes each."""

    def __init__(self) -> None:
        self._guards: dict[Hashable, TensorGuards] = {}
        self._count = 0  # tensors that the guards compare with

    def __reduce__(self) -> tuple[type[KnownTensors], tuple[()]]:
        return KnownTensors, ()  # a copy knows none

    def passed(self, key: Hashable, tensors: Sequence[Any], check: Callable[[], bool]) -> bool:
        """Whether `tensors` are like the last as many that passed with `key`, or pass `check`."""
        known = key, len(tensors)
        guard = self._guards.get(known)
        if guard is not None and guard.check(*tensors):
            return True
        if not check():
            return False
        if guard is None:
            self._count += len(tensors)
        if self._count > self.MOST:
            self._guards.clear()
            self._count = len(tensors)
        self._guards[known] = TensorGuards(
            *tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None
        )
        return True


def check_parameter(name: str, parameter: Tensor) -> None:
    """Raise `ParameterError` unless the tensor can be kept on a device.

    A lazy parameter, which has no shape yet, is looked at when it has one.
    """
    if is_plain(parameter) or is_lazy(parameter):
        return
    if parameter.dtype not in FORMATS:
        raise ParameterError(name, f"of a dtype among {_NAMES}", parameter.dtype)
    if parameter.layout != torch.strided or parameter.is_nested:
        raise ParameterError(name, "dense", "nested" if parameter.is_nested else parameter.layout)
    if not is_on_host_or_accelerator(parameter):
        raise ParameterError(name, "on the CPU or an accelerator", f"on {parameter.device}")
    if is_partial(parameter):
        raise ParameterError(name, "without sums that are yet to be made", sharding(parameter))
    part = local(parameter)
    if not _has_memory(part):
        raise ParameterError(name, "a tensor with memory of its own", f"a {type(part).__name__}")
    if shares_memory(part):
        strides = f"of strides {part.stride()} and shape {tuple(part.shape)}"
        raise ParameterError(name, "a tensor whose elements share no memory", strides)


def _has_memory(tensor: Tensor) -> bool:
    """Whether a tensor holds its elements itself: those that dispatch in Python may be made of
    other tensors, or have no elements."""
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def shares_memory(tensor: Tensor) -> bool:
    """Whether two elements of a dense tensor are the same memory."""
    if tensor.numel() == 0:
        return False
    reach, nested = 0, True
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride == 0:
                return True
            nested &= stride > reach
            reach += (size - 1) * stride
    if nested:
        return False
    places = torch.arange(reach + 1, device="cpu").as_strided(tensor.shape, tensor.stride())
    return bool(np.unique(places.numpy()).size < tensor.numel())


def check_memory(parameters: Mapping[Tensor, str], *, parts: Collection[Tensor] = ()) -> None:
    """Raise `ParameterError` for parameters that are views of one memory, unless all of the views
    are `parts`: contiguous, without a common byte.

    Parameters
    ----------
    parameters : their names.
    """
    views: dict[int, list[Tensor]] = {}
    parts = {*parts}
    for parameter, name in parameters.items():
        storage = parameter.untyped_storage()
        others = views.setdefault(storage._cdata, []) if storage.nbytes() else []
        for other in others:
            if not ({parameter, other} <= parts and _are_apart(parameter, other)):
                raise ParameterError(
                    name, "in memory of its own", f"in that of {parameters[other]}"
                )
        others.append(parameter)


def _are_apart(one: Tensor, other: Tensor) -> bool:
    first, second = sorted((one, other), key=lambda each: each.storage_offset())
    contiguous = one.is_contiguous() and other.is_contiguous()
    return contiguous and first.storage_offset() + first.numel() <= second.storage_offset()


def check_gradient(name: str, parameter: Tensor, gradient: Tensor) -> None:
    """Raise `GradientError` unless the gradient of `parameter` can be sent."""
    if is_plain(gradient) and is_plain(parameter) and gradient.shape == parameter.shape:
        return
    if gradient.layout != torch.strided:
        raise GradientError(name, "dense", f"sparse ({gradient.layout})")
    if gradient.dtype not in FORMATS:
        raise GradientError(name, f"of a dtype among {_NAMES}", gradient.dtype)
    if gradient.device != parameter.device:
        raise GradientError(name, f"on {parameter.device}", f"on {gradient.device}")
    if gradient.shape != parameter.shape:
        raise GradientError(name, f"of shape {tuple(parameter.shape)}", tuple(gradient.shape))
    if not on_same_mesh(gradient, parameter):
        raise GradientError(name, sharding(parameter), sharding(gradient))
    part = local(gradient)
    if not _has_memory(part):
        raise GradientError(name, "a tensor with memory of its own", f"a {type(part).__name__}")
