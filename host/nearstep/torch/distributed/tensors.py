"""Tensors as bytes and in one dimension, and the names of what is done to them."""

from __future__ import annotations

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
