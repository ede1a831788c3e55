"""Tensors as bytes and in one dimension, and the names of what is done to them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp

from nearstep.coarse.service.messages import Operation
from nearstep.errors import ArgumentError

RING_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Summed by the devices, in float32; 16 bits are rounded once, when they come back."""

RING_OPERATIONS: dict[Any, Operation] = {
    ReduceOp.SUM: "sum",
    ReduceOp.AVG: "average",
    ReduceOp.MAX: "max",
}


def tensors_of(given: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The values of a call's tensors, which are one tensor or several.

    Autograd sees no use of them, as it sees none of gloo's. Sparse ones are given as they are: a
    sum may have other indices.
    """
    listed = [given] if isinstance(given, Tensor) else given
    return [each.data if each.layout == torch.strided else each for each in listed]


def lists_of(given: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """As `tensors_of`, for a call that has one list or several."""
    if given and isinstance(given[0], Tensor):
        return [tensors_of(given)]  # type: ignore[arg-type]
    return [tensors_of(each) for each in given]


def operation_of(options: Any) -> Any:
    """The reduction of a call: of its options, given by itself, or a sum."""
    return ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def root_of(options: Any) -> int:
    """The root of a call: of its options, or given by itself."""
    return int(getattr(options, "rootRank", options))


def with_root(options: Any, given: Any) -> Any:
    """Options with the root of a call."""
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
    """The elements in one dimension: the tensor's own where it is contiguous, else a copy."""
    whole = dense(tensor)
    return whole if whole.dim() == 1 else whole.view(-1)


def dense(tensor: Tensor) -> Tensor:
    """The tensor where it is contiguous, else a copy that is; without strides of its own.

    A contiguous dimension of one element may have any stride, and gloo would use it.
    """
    if tensor.layout != torch.strided:
        return tensor
    whole = tensor.contiguous()
    strides = [*accumulate(reversed(whole.shape[1:]), lambda n, size: n * max(1, size), initial=1)]
    if whole.stride() == tuple(reversed(strides[: whole.dim()])):
        return whole
    return whole.as_strided(whole.shape, strides[::-1], whole.storage_offset())


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor.

    `Tensor.numpy()` would make its storage one that can never be resized, as FSDP1 resizes it.
    """
    found: NDArray[np.uint8] = np.from_dlpack(flat(tensor.detach()).view(torch.uint8))  # type: ignore[assignment]
    return found


def ring_operation(tensor: Tensor, operation: Any) -> Operation | None:
    """What the rings of the devices do for a reduction; None: they cannot."""
    if tensor.dtype not in RING_DTYPES or tensor.layout != torch.strided:
        return None
    return next((name for op, name in RING_OPERATIONS.items() if operation == op), None)


class TensorsError(ArgumentError, RuntimeError):
    """Tensors of a call that do not fit together. Nothing was sent; gloo raises a RuntimeError."""


def check_parts(part: Tensor, whole: Tensor, parts: int) -> None:
    """Refuse a tensor that is not as large as all parts, or of another dtype.

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
    """Refuse a list that has not one tensor for each process, or unlike ones.

    Raises
    ------
    TensorsError : says which.
    """
    if len(tensors) != size:
        raise TensorsError(f"list must have {size} tensors, not {len(tensors)}")
    for index, each in enumerate(tensors):
        if each.dtype != like.dtype or each.numel() != like.numel():
            raise TensorsError(
                f"tensor {index} must have {like.numel()} elements of {like.dtype}, not "
                f"{each.numel()} of {each.dtype}"
            )
