"""Tensors as bytes and in one dimension, and the names of what is done to them."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Tensors of a call, which has one tensor or several."""
    return [given] if isinstance(given, Tensor) else list(given)


def lists_of(given: Sequence[Tensor] | Sequence[Sequence[Tensor]]) -> list[list[Tensor]]:
    """Lists of tensors of a call, which has one list or several."""
    if given and isinstance(given[0], Tensor):
        return [tensors_of(given)]  # type: ignore[arg-type]
    return [list(each) for each in given]


def operation_of(options: Any) -> Any:
    """The reduction of a call: of its options, given by itself, or a sum."""
    return ReduceOp.SUM if options is None else getattr(options, "reduceOp", options)


def root_of(options: Any) -> int:
    """The root of a call: of its options, or given by itself."""
    return int(getattr(options, "rootRank", options))


def operation_name(operation: Any) -> str:
    known = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
    return next((each for each in known if operation == getattr(ReduceOp, each)), "other")


def options_of(operation: Any) -> Any:
    options = AllreduceOptions()
    options.reduceOp = operation
    return options


def flat(tensor: Tensor) -> Tensor:
    """The elements in one dimension: the tensor's own where it is contiguous, else a copy."""
    return tensor.detach().contiguous().view(-1)


def bytes_of(tensor: Tensor) -> NDArray[np.uint8]:
    """The bytes of a contiguous tensor."""
    flat = tensor.detach().view(-1)
    if flat.dtype == torch.bool:
        flat = flat.view(torch.uint8)
    found: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return found


def ring_operation(tensor: Tensor, operation: Any) -> Operation | None:
    """What the rings of the devices do for a reduction; None: they cannot."""
    if tensor.dtype not in RING_DTYPES or tensor.layout != torch.strided:
        return None
    return next((name for op, name in RING_OPERATIONS.items() if operation == op), None)


def check_parts(part: Tensor, whole: Tensor, parts: int) -> None:
    """Refuse a tensor that is not as large as all parts.

    Raises
    ------
    ArgumentError : its elements are not `parts` times those of `part`.
    """
    if part.numel() * parts != whole.numel():
        raise ArgumentError(
            f"tensor must have {part.numel()} x {parts} elements, not {whole.numel()}"
        )
