"""Moments in 8 bits as tensors: codes, and a scale for each 256 of them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nearstep import blockwise
from nearstep.blockwise import Blockwise
from nearstep.torch import convert
from nearstep.torch.errors import StateError
from nearstep_spec.blockwise import SIGNED


class Coded(NamedTuple):
    """A moment in 8 bits.

    Attributes
    ----------
    codes : uint8, of the parameter's shape.
    scales : float32, of one dimension: one for each 256 elements, in logical order.
    """

    codes: Tensor
    scales: Tensor


def encoded(value: Tensor, form: str) -> Coded:
    """A floating-point tensor in 8 bits, on the host."""
    codes, scales = blockwise.quantize(convert.to_float32(value), signed=SIGNED[form])
    return Coded(torch.from_numpy(codes).view(value.shape), torch.from_numpy(scales))


def decoded(value: Coded, form: str) -> Tensor:
    """Back to float32, on the host."""
    array = blockwise.dequantize(flat_arrays(value), signed=SIGNED[form])
    return torch.from_numpy(array).view(value.codes.shape)


def flat_arrays(value: Coded) -> Blockwise:
    """The same as flat arrays."""
    codes = value.codes.detach().cpu().contiguous().reshape(-1)
    scales = value.scales.detach().cpu().contiguous()
    return Blockwise(codes.numpy(), scales.numpy())


def tensors(found: Blockwise, parameter: Tensor) -> Coded:
    """Flat arrays as tensors, where the parameter is."""
    scales = torch.from_numpy(found.scales).to(parameter.device)
    return Coded(convert.to_tensor(found.codes, parameter), scales)


def check_codes(label: str, parameter: Tensor, key: str, value: object) -> Tensor:
    """`value` as codes of a parameter's moment: uint8, of its shape.

    Raises
    ------
    StateError
    """
    if not isinstance(value, Tensor) or value.dtype != torch.uint8:
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise StateError(label, f"have a tensor of torch.uint8 as {key!r}", found)
    return _checked(label, key, value, tuple(parameter.shape))


def check_scales(label: str, parameter: Tensor, key: str, value: object) -> Tensor:
    """`value` as scales of such: float32, one for each 256 elements.

    Raises
    ------
    StateError
    """
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        found = value.dtype if isinstance(value, Tensor) else type(value).__name__
        raise StateError(label, f"have a tensor of torch.float32 as {key!r}", found)
    return _checked(label, key, value, (blockwise.groups(convert.size(parameter)),))


def _checked(label: str, key: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    if value.layout is not torch.strided or value.device.type == "meta":
        raise StateError(label, f"have a dense tensor with data as {key!r}", value.layout)
    if tuple(value.shape) != shape:
        raise StateError(label, f"have {key!r} of shape {shape}", tuple(value.shape))
    return value.detach().cpu()
