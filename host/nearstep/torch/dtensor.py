"""Parameters that are DTensors, and their local tensors.

A device keeps the local tensor of its process, on which torch's fused step works, too. State and
checkpoints have the parameter's mesh and placements.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_dtensor(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this is a DTensor."""
    if type(tensor) is Tensor or type(tensor) is Parameter:
        return False
    module = sys.modules.get("torch.distributed.tensor")  # imported by whoever has one
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return the local tensor, detached, without a copy."""
    if is_dtensor(tensor):
        part = tensor.to_local().detach()
        wait: Callable[[], Tensor] | None = getattr(part, "wait", None)  # a pending collective's
        return part if wait is None else wait()
    return tensor.detach()


def chunk(
    tensor: Tensor, like: Sequence[int] | None = None
) -> tuple[list[int], list[int], list[int]]:
    """Return the shape of the whole, and offset and shape of what this process has of it.

    Parameters
    ----------
    like : shape of another tensor that is sharded as this one; None: this one.
    """
    shape = list(tensor.shape if like is None else like)
    if not is_dtensor(tensor):
        return shape, [0] * len(shape), shape
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found = compute_local_shape_and_global_offset(
        torch.Size(shape), tensor.device_mesh, tensor.placements
    )
    size, offset = map(list, found)
    return shape, offset or [0] * len(shape), size


def pieces(tensor: DTensor) -> list[int]:
    """Return into how many parts each dimension is sharded over processes."""
    found = [1] * tensor.dim()
    for placement, size in zip(tensor.placements, tensor.device_mesh.shape, strict=True):
        dim: int | None = getattr(placement, "dim", None)
        if dim is not None and not placement.is_replicate() and not placement.is_partial():
            found[dim] *= size
    return found


def most_elements(tensor: DTensor) -> int:
    """Return the elements of the largest shard."""
    sizes = zip(tensor.shape, pieces(tensor), strict=True)
    return math.prod(-(-size // count) for size, count in sizes)


def beside(parameter: DTensor, values: Tensor, most: int) -> DTensor:
    """Return values of each process, of shape (n,), as a tensor that is sharded like a parameter.

    Its dimensions are the parameter's, with one element for each shard, and a last one of `most`
    elements, where zeros follow the values.
    """
    shape = [*pieces(parameter), most]
    part = values.new_zeros(most)
    part[: values.numel()] = values
    return type(parameter).from_local(
        part.view(*[1] * parameter.dim(), most),
        parameter.device_mesh,
        parameter.placements,
        shape=torch.Size(shape),
        stride=torch.empty(shape, device="meta").stride(),
    )


def alike(part: Tensor, parameter: Tensor) -> Tensor:
    """Return local elements, in order, as a tensor of the parameter's shape and placements."""
    if not is_dtensor(parameter):
        return part.view(parameter.shape)
    return type(parameter).from_local(
        part.view(local(parameter).shape),
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def sharding(tensor: Tensor) -> str:
    """Return a description of a tensor's mesh and placements."""
    if is_dtensor(tensor):
        return f"spread by {list(tensor.placements)} over {tensor.device_mesh}"
    return "on this process alone"


def same_placements(tensor: Tensor, parameter: Tensor) -> bool:
    """Return whether both have the same mesh and placements, or neither is a DTensor."""
    if not (is_dtensor(tensor) and is_dtensor(parameter)):
        return is_dtensor(tensor) == is_dtensor(parameter)
    same_mesh = tensor.device_mesh == parameter.device_mesh
    return same_mesh and tuple(tensor.placements) == tuple(parameter.placements)


def on_same_mesh(tensor: Tensor, parameter: Tensor) -> bool:
    """Return whether both have the same mesh, or neither is a DTensor."""
    if not (is_dtensor(tensor) and is_dtensor(parameter)):
        return is_dtensor(tensor) == is_dtensor(parameter)
    return bool(tensor.device_mesh == parameter.device_mesh)


def is_sharded(tensor: Tensor) -> bool:
    """Return whether this process lacks elements that other processes have."""
    if not is_dtensor(tensor):
        return False
    sizes = zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    return any(size > 1 and not placement.is_replicate() for placement, size in sizes)


def is_partial(tensor: Tensor) -> bool:
    """Return whether the values are partial sums, not yet reduced over processes."""
    return is_dtensor(tensor) and any(placement.is_partial() for placement in tensor.placements)


def redistributed(gradient: Tensor, parameter: Tensor) -> Tensor:
    """Redistribute a gradient on the parameter's mesh to the parameter's placements."""
    if is_dtensor(gradient) and is_dtensor(parameter) and not same_placements(gradient, parameter):
        return gradient.redistribute(placements=parameter.placements)
    return gradient
