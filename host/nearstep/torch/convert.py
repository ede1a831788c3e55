"""Tensors of three formats as the flat fp32 arrays that a device keeps, and back.

Of a tensor that is spread over processes, what this process has of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nearstep.storage.checksum import crc32
from nearstep.threads import at_once
from nearstep.torch.dtensor import alike, is_dtensor, local

FORMATS = (torch.float32, torch.float16, torch.bfloat16)
"""Formats of parameters and gradients. The device keeps fp32."""

SUMMED = 1 << 22
"""Elements of a part of a fingerprint."""

NAMES: Mapping[torch.dtype, str] = MappingProxyType(
    dict(zip(FORMATS, ("fp32", "fp16", "bf16"), strict=True))
)
"""What a kernel calls them."""

DTYPES: Mapping[str, torch.dtype] = MappingProxyType({name: dtype for dtype, name in NAMES.items()})
"""Formats by these names."""


def second_dtype(gradient: torch.dtype) -> torch.dtype:
    """Dtype of the gradient of the second run of a step, by that of the first one's."""
    return torch.promote_types(gradient, torch.bfloat16)


def to_float32(tensor: Tensor) -> NDArray[np.float32]:
    """Elements of `tensor` in logical order as a flat fp32 array.

    Exact: every fp16 and bf16 value is an fp32 value. A contiguous fp32 tensor is not copied, so
    the array is to be read only, and before the tensor changes.
    """
    flat = _flat(tensor)
    if flat.dtype is not torch.float32:
        flat = flat.to(torch.float32)
    array: NDArray[np.float32] = flat.numpy()
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def to_words(tensor: Tensor) -> NDArray[np.generic]:
    """Elements of `tensor` in logical order as a flat array of their own format: float32, float16,
    or uint16 that holds bfloat16.

    A contiguous tensor is not copied.
    """
    flat = _flat(tensor)
    if flat.dtype == torch.bfloat16:  # numpy has none
        return np.ascontiguousarray(flat.view(torch.int16).numpy()).view(np.uint16)
    array: NDArray[np.generic] = flat.numpy()
    return array if array.flags.c_contiguous else np.ascontiguousarray(array)


def narrow(array: NDArray[np.float32], name: str) -> NDArray[np.generic]:
    """A flat fp32 array, rounded to nearest even to `fp32`, `fp16` or `bf16`."""
    return to_words(torch.from_numpy(array).to(DTYPES[name]))


def widen(array: NDArray[Any]) -> NDArray[np.float32]:
    """What `to_words` returned, as fp32. Exact."""
    if array.dtype == np.uint16:
        widened: NDArray[np.float32] = (array.astype(np.uint32) << 16).view(np.float32)
        return widened
    return array.astype(np.float32)


def negated(array: NDArray[Any]) -> NDArray[Any]:
    """A new array like `array`, in any format of `to_words`, with every sign bit flipped,
    of zeros and NaN too."""
    words = array.view(f"u{array.itemsize}")
    flipped: NDArray[Any] = (words ^ words.dtype.type(1 << (8 * array.itemsize - 1))).view(
        array.dtype
    )
    return flipped


def store(array: NDArray[Any], tensor: Tensor) -> None:
    """Copy a flat fp32 array into `tensor`, rounding to nearest even if it has 16 bits; or what
    `to_words` made of a tensor of this shape and format."""
    target = local(tensor)
    wide = array.dtype == np.float32
    words = torch.from_numpy(array if wide else array.view(np.int16))
    with torch.inference_mode():  # `tensor` may be made in it
        target.copy_((words if wide else words.view(target.dtype)).view(target.shape))


def landing(tensor: Tensor, form: str = "fp32") -> NDArray[Any] | None:
    """The memory of `tensor` as a flat array of a format, as of `to_words`, that may be written;
    None if there is none.

    Whoever writes it calls `mark_changed` afterwards, so that autograd notices as it does
    after any other in-place change.
    """
    target = local(tensor)
    if not target.is_cpu or target.dtype != DTYPES[form]:
        return None
    if not target.is_contiguous() or target.is_neg():
        return None
    return to_words(target)


def mark_changed(tensor: Tensor) -> None:
    """Tell autograd that the memory of `landing` was written."""
    torch.autograd.graph.increment_version(tensor)
    if is_dtensor(tensor):
        torch.autograd.graph.increment_version(local(tensor))


def size(tensor: Tensor) -> int:
    """Elements."""
    return local(tensor).numel() if is_dtensor(tensor) else tensor.numel()


def to_tensor(array: NDArray[Any] | Tensor, parameter: Tensor) -> Tensor:
    """A flat array of any format of `to_words` as a tensor of the parameter's shape, where it is,
    and spread as it is; a flat tensor, where that is."""
    if isinstance(array, Tensor):
        return alike(array, parameter)
    if array.dtype == np.uint16:
        flat = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        flat = torch.from_numpy(array)
    return alike(flat.to(parameter.device), parameter)


def fingerprint(tensor: Tensor) -> int:
    """CRC-32 of the elements' bytes, of many of the CRCs of parts: finds every change of up to 32
    neighbouring bits.

    torch's version counter is no substitute: a write through `tensor.data`, through `numpy()`
    or an assignment to `tensor.data` leaves it as it was.
    """
    sums = part_sums(tensor)
    sums.make_all()
    return sums.fingerprint


def part_sums(tensor: Tensor) -> PartSums:
    """What makes the `fingerprint` of a tensor, of which nothing has been looked at."""
    flat = _flat(tensor)
    if flat.dtype == torch.bfloat16:  # numpy has none
        flat = flat.view(torch.int16)
    return PartSums(np.ascontiguousarray(flat.numpy()))


class PartSums:
    """CRCs of the parts of an array, of which its fingerprint is made.

    Parameters
    ----------
    words : of shape (elements,), contiguous.
    """

    def __init__(self, words: NDArray[Any]) -> None:
        self._words = words
        self.count = -(-words.size // SUMMED)
        self._sums = np.zeros(self.count, np.uint32)

    def make(self, number: int) -> None:
        """Look at a part."""
        self._sums[number] = crc32(self._words[number * SUMMED : (number + 1) * SUMMED].data)

    def make_all(self) -> None:
        """Look at all parts."""
        at_once([partial(self.make, number) for number in range(self.count)])

    @property
    def fingerprint(self) -> int:
        """`fingerprint` of the array, when every part has been looked at."""
        return crc32(self._sums.data)


def merge_master(master: NDArray[np.float32], tensor: Tensor) -> NDArray[np.float32]:
    """New fp32 master of a 16-bit `tensor` of which some elements have been changed.

    An element that still is the rounded value of its master keeps the master, with all its bits;
    any other takes the tensor's value. For fp32 that is the tensor itself.
    """
    current = to_float32(tensor)
    if tensor.dtype == torch.float32:
        return current
    rounded = to_float32(torch.from_numpy(master).to(tensor.dtype))
    same = rounded.view(np.uint32) == current.view(np.uint32)
    return np.where(same, master, current)


def _flat(tensor: Tensor) -> Tensor:
    """Elements in logical order, as numpy takes them: on the host, with no negation left to do."""
    part = local(tensor).cpu()
    if part.is_neg():
        part = part.resolve_neg()
    return part if part.dim() == 1 else part.reshape(-1)
