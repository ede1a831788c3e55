"""Conversions of tensors, and options and checks of collectives."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp

from nearstep.coarse.service.messages import ReduceOpName
from nearstep.errors import ArgumentError

RING_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that the devices sum, in float32; results of 16 bits are rounded once, at the end."""

RING_OPERATIONS: dict[Any, ReduceOpName] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "average",
    ReduceOp.MAX: "max",
}


def tensors_of(given: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """Return the values of a call's tensors, which are one tensor or several, as a list.

    Autograd records no use of them, as with gloo. Sparse tensors are returned unchanged: a sum may
    have other indices.
    """
    listed = [given] if isinstance(given, Tensor) else given
    return [each.data if each.layout == torch.strided else each for each in listed]


def lists_of(given: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Return lists as of `tensors_of`, for a call with one list or several."""
    if given and isinstance(given[0], Tensor):
        return [tensors_of(given)]  # type: ignore[arg-type]
    return [tensors_of(each) for each in given]


def operation_of(options: Any) -> Any:
    """Return the reduction of a call: of its options, or the argument itself; a sum by default."""
    return ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def root_of(options: Any) -> int:
    """Return the root of a call: of its options, or the argument itself."""
    return int(getattr(options, "rootRank", options))


def with_root(options: Any, given: Any) -> Any:
    """Set the root of a call in `options`, and return them."""
    options.rootRank = root_of(given)
    return options


def operation_name(operation: Any) -> str:
    known = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
    return next((each for each in known if operation == getattr(ReduceOp, each)), "other")


def options_of(operation: Any) -> Any:
    options = AllreduceOptions()
    options.reduceOp = operation
    return options


def flat(tensor: Tensor) -> Tensor:
    """Return a view in one dimension of a contiguous tensor, else a copy."""
    whole = dense(tensor)
    return whole if whole.dim() == 1 else whole.view(-1)


def dense(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy, contiguous and with standard strides.

    A contiguous tensor may have any stride in a dimension of one element, and gloo would use it.
    """
    if tensor.layout != torch.strided:
        return tensor
    whole = tensor.contiguous()
    strides = [*accumulate(reversed(whole.shape[1:]), lambda n, size: n * max(1, size), initial=1)]
    if whole.stride() == tuple(reversed(strides[: whole.dim()])):
        return whole
    return whole.as_strided(whole.shape, strides[::-1], whole.storage_offset())


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """Return a contiguous tensor's memory as bytes, without a copy.

    `Tensor.numpy()` would make the storage non-resizable, and FSDP1 resizes it.
    """
    found: NDArray[np.uint8] = np.from_dlpack(flat(tensor.detach()).view(torch.uint8))  # type: ignore[assignment]
    return found


def ring_operation(tensor: Tensor, operation: Any) -> ReduceOpName | None:
    """Return the rings' operation for a reduction; None if they have none."""
    if tensor.dtype not in RING_DTYPES or tensor.layout != torch.strided:
        return None
    return next((name for op, name in RING_OPERATIONS.items() if operation == op), None)


class TensorsError(ArgumentError, RuntimeError):
    """A call's tensors differ in size or dtype, and nothing was sent; a RuntimeError, as gloo's."""


def check_parts(part: Tensor, whole: Tensor, parts: int) -> None:
    """Check that a tensor has the elements of all parts, and their dtype.

    Raises
    ------
    TensorsError : its elements are not `parts` times those of `part`, or the dtypes differ.
    """
    if part.numel() * parts != whole.numel():
        raise TensorsError(
            f"tensor must have {part.numel()} x {parts} elements, not {whole.numel()}"
        )
    if part.dtype != whole.dtype:
        raise TensorsError(f"tensors must have one dtype, not {part.dtype} and {whole.dtype}")


def check_list(tensors: Sequence[Tensor], size: int, like: Tensor) -> None:
    """Check that a list has one tensor for each process, all like `like`.

    Raises
    ------
    TensorsError : another number of tensors; or a tensor of another size or dtype, by its index.
    """
    if len(tensors) != size:
        raise TensorsError(f"list must have {size} tensors, not {len(tensors)}")
    for index, each in enumerate(tensors):
        if each.dtype != like.dtype or each.numel() != like.numel():
            raise TensorsError(
                f"tensor {index} must have {like.numel()} elements of {like.dtype}, not "
                f"{each.numel()} of {each.dtype}"
            )
