"""Number formats of a kernel, as optimizers of torch see them, and moments in 8 bits as tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearstep import blockwise
from nearstep.blockwise import BlockLayout, Blockwise
from nearstep.placement import LINE_ELEMENTS
from nearstep.torch import convert
from nearstep.torch.dtensor import alike, beside, is_dtensor, local, most_elements, pieces
from nearstep.torch.errors import ParameterError
from nearstep.updater.formats import DTYPES
from nearstep_spec.blockwise import GROUP, SIGNED
from nearstep_spec.updater.config import UpdateKernelConfig

TENSORS: Mapping[str, torch.dtype] = MappingProxyType(
    {**convert.DTYPES, **dict.fromkeys(SIGNED, torch.uint8)}
)
"""Dtype of a tensor of each format; formats in 8 bits have scales beside it."""


class Quantized(NamedTuple):
    """A moment in 8 bits.

    Attributes
    ----------
    codes : uint8, of the parameter's shape.
    scales : float32, as of `scales_shape`: one for each 256 elements of what a process has, in
        logical order. A shard is quantized like a tensor of its own.
    """

    codes: Tensor
    scales: Tensor


def scales_shape(parameter: Tensor) -> list[int]:
    """Shape of the scales of a parameter's moments: (groups,); of a DTensor, with its placements,
    (shards of the first dimension, ..., groups of the largest shard)."""
    if not is_dtensor(parameter):
        return [blockwise.groups(parameter.numel())]
    return [*pieces(parameter), blockwise.groups(most_elements(parameter))]


def spread_scales(scales: Tensor, parameter: Tensor) -> Tensor:
    """Scales of what this process has, of shape (groups,), as scales of a parameter."""
    if not is_dtensor(parameter):
        return scales
    return beside(parameter, scales, scales_shape(parameter)[-1])


def quantize(value: Tensor, form: str) -> Quantized:
    """A floating-point tensor in 8 bits, on the host."""
    codes, scales = blockwise.quantize(convert.to_float32(value), signed=SIGNED[form])
    return Quantized(
        alike(torch.from_numpy(codes), value), spread_scales(torch.from_numpy(scales), value)
    )


def dequantize(value: Quantized, form: str) -> Tensor:
    """Back to float32, on the host."""
    array = blockwise.dequantize(flat_arrays(value), signed=SIGNED[form])
    return alike(torch.from_numpy(array), value.codes)


def regrouped(codes: Tensor, scales: Tensor, form: str) -> tuple[Tensor, Tensor]:
    """Local codes, of the shape of local `codes`, and scales of their groups, of shape (groups,).

    Groups whose elements have one scale keep it, and their codes; others are quantized anew.

    Parameters
    ----------
    scales : of each element, float32.
    """
    own, each = (local(tensor).cpu().contiguous() for tensor in (codes, scales))
    flat, spread = own.view(-1).numpy(), each.view(-1).numpy()
    one, signed = Blockwise(flat, np.ones(blockwise.groups(flat.size), np.float32)), SIGNED[form]
    with np.errstate(invalid="ignore", over="ignore"):
        values = blockwise.dequantize(one, signed=signed) * spread
    anew = blockwise.quantize(values, signed=signed)
    begins = np.arange(0, flat.size, GROUP)
    first = spread[begins]
    equal = np.repeat(first, GROUP)[: flat.size].view(np.uint32) == spread.view(np.uint32)
    keeps = np.logical_and.reduceat(equal, begins) if flat.size else np.empty(0, bool)
    found = np.where(np.repeat(keeps, GROUP)[: flat.size], flat, anew.codes)
    groups = np.where(keeps, first, anew.scales)
    return torch.from_numpy(found).view(own.shape), torch.from_numpy(groups)


def flat_arrays(value: Quantized) -> Blockwise:
    """The same as flat arrays."""
    codes = local(value.codes).cpu().contiguous().reshape(-1)
    scales = local(value.scales).cpu().contiguous().reshape(-1)
    if is_dtensor(value.scales):  # of a smaller shard there are fewer
        scales = scales[: blockwise.groups(codes.numel())]
    return Blockwise(codes.numpy(), scales.numpy())


def tensors(found: Blockwise, parameter: Tensor) -> Quantized:
    """Flat arrays as tensors, where the parameter is."""
    scales = torch.from_numpy(found.scales).to(parameter.device)
    return Quantized(convert.to_tensor(found.codes, parameter), spread_scales(scales, parameter))


@dataclass(frozen=True)
class Formats:
    """Formats that the kernel has.

    Attributes
    ----------
    gradient, copy_out : of gradients, and of copies of the updated parameters.
    state : of states that are not fp32, by array.
    blocks : how those in 8 bits lie in memory; None if there are none.
    masters : parameters in 16 bits may have a master in fp32.
    """

    gradient: Sequence[str]
    copy_out: Sequence[str]
    state: Mapping[str, str]
    blocks: BlockLayout | None = None
    masters: bool = True

    @classmethod
    def of(cls, kernel: UpdateKernelConfig) -> Self:
        """Those of a kernel."""
        return cls(
            kernel.gradient_formats,
            kernel.copy_out_formats,
            kernel.rule_set.whole.formats,
            kernel.block_layout if kernel.blockwise else None,
        )

    @classmethod
    def of_tensors(cls, state: Mapping[str, str]) -> Self:
        """Those of a parameter, and of its state, that are updated where they are."""
        quantized = any(form in SIGNED for form in state.values())
        blocks = BlockLayout(blockwise.GROUP, 4) if quantized else None
        return cls((), (), state, blocks)

    def gradient_of(self, dtype: torch.dtype) -> str:
        """Format in which gradients of this dtype are sent: their own if there is one, else
        fp32."""
        name = convert.NAMES[dtype]
        return name if name in self.gradient else "fp32"

    def copy_of(self, dtype: torch.dtype) -> str | None:
        """Format of the copy that is fetched of parameters of this dtype; None: the master is."""
        name = convert.NAMES[dtype]
        return name if name in self.copy_out and name != self.state_of("p") else None

    def check(self, label: str, parameter: Tensor) -> None:
        """Raise `ParameterError` unless the rule keeps parameters like this one: as they
        are, or in fp32."""
        kept = self.state_of("p")
        own = convert.NAMES[parameter.dtype]
        if kept != own and not (self.masters and kept == "fp32"):
            raise ParameterError(label, f"of {kept}, as the rule keeps them", parameter.dtype)

    def state_of(self, array: str) -> str:
        """Format of a state."""
        return self.state.get(array, "fp32")

    @property
    def dtypes(self) -> Mapping[str, np.dtype]:
        """Of states that are not fp32, in memory."""
        return {array: DTYPES[form] for array, form in self.state.items()}

    @property
    def quantized(self) -> Mapping[str, str]:
        """Those of states in 8 bits."""
        return {array: form for array, form in self.state.items() if form in SIGNED}

    def line(self, *, narrow: bool) -> int:
        """Elements that extents begin on multiples of.

        Parameters
        ----------
        narrow : there are arrays of 16 bits.
        """
        if self.blocks is not None:
            return self.blocks.elements
        return 2 * LINE_ELEMENTS if narrow or self.state else LINE_ELEMENTS

    def encode(self, array: str, values: NDArray[np.float32]) -> NDArray[Any]:
        """Values of a state as memory has them."""
        form = self.state_of(array)
        if form in SIGNED:
            return self.pack(blockwise.quantize(values, signed=SIGNED[form]))
        return values if form == "fp32" else convert.narrow(values, form)

    def pack(self, codes: Blockwise) -> NDArray[np.uint8]:
        """A state in 8 bits as memory has it."""
        assert self.blocks is not None, "the kernel has states in 8 bits"
        return blockwise.pack(codes, self.blocks)

    def unpack(self, data: NDArray[np.uint8]) -> Blockwise:
        """What memory has of a state in 8 bits."""
        assert self.blocks is not None, "the kernel has states in 8 bits"
        return blockwise.unpack(data, self.blocks)

    def narrow(self, dtype: torch.dtype) -> bool:
        """Whether there are arrays of 16 bits for parameters of this dtype."""
        return self.gradient_of(dtype) != "fp32" or self.copy_of(dtype) is not None


def gradient_array(form: str) -> str:
    """Array that gradients of a format are sent to."""
    return "g" if form == "fp32" else f"g_{form}"


def copy_array(form: str) -> str:
    """Array that the kernel writes a copy of the parameters to."""
    return f"copy_{form}"
