"""Tensors as bytes and in one dimension, and the names of what is done to them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._C._distributed_c10d import AllreduceOptions, ReduceOp


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
