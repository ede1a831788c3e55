"""Gradients that are compressed where they are: elements of largest magnitude by operations of
torch, on an accelerator or the host.

Which are kept, and what stays, `nearstep.torch.topk` and `nearstep.torch.compression` say: bits are
those of the host's own code. Index and value of what is kept are all that has to leave the memory
of the gradient.

Ref: Smart-Infinity, section IV-C.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nearstep.torch import convert
from nearstep.torch.compression import Compressed, Compression
from nearstep.torch.dtensor import local
from nearstep.torch.topk import BLOCK, NOTHING, kept_of_block

BLOCKS_AT_ONCE = 64
"""Blocks whose keys, of 8 bytes an element, are in memory at once."""

_MAGNITUDE = 0x7FFFFFFF
_LAST = BLOCK - 1


@dataclass(frozen=True, eq=False)
class Chosen:
    """One gradient, compressed, in the memory that it was in.

    Attributes
    ----------
    index : positions in the flat parameter, ascending; int32, int64 of 2^31 elements and more.
    value : what is sent for them: float32, float16 or bfloat16.
    residual : fp32, of one dimension: what the next step adds to its gradient; None without error
        feedback.
    """

    index: Tensor
    value: Tensor
    residual: Tensor | None

    @property
    def nbytes(self) -> int:
        """Of index and value."""
        return sum(each.numel() * each.element_size() for each in (self.index, self.value))

    def compressed(self) -> Compressed:
        """The same with index and value on the host, once they are there."""
        index = self.index.cpu().numpy().astype(np.intp)
        return Compressed(index, convert.to_words(self.value), self.residual)


def flat(tensor: Tensor, device: torch.device) -> Tensor:
    """What this process has of a tensor, on a device, in logical order, with no negation left to
    do."""
    return local(tensor).to(device).resolve_neg().reshape(-1)


def take_largest(gradient: Tensor, share: float) -> Tensor:
    """Positions of the elements of each block that are kept, ascending, int64.

    Parameters
    ----------
    gradient : fp32 of one dimension, contiguous.
    share : above 0, at most 1; see `nearstep.torch.topk.kept_of_block`.
    """
    words = gradient.view(torch.int32)
    blocks, rest = divmod(gradient.numel(), BLOCK)
    found = [torch.empty(0, dtype=torch.int64, device=gradient.device)]
    for first in range(0, blocks, BLOCKS_AT_ONCE):
        stop = min(first + BLOCKS_AT_ONCE, blocks)
        rows = words[first * BLOCK : stop * BLOCK].view(-1, BLOCK)
        found.append(_largest_of(rows, kept_of_block(BLOCK, share), first * BLOCK))
    if rest:
        rows = words[blocks * BLOCK :].view(1, rest)
        found.append(_largest_of(rows, kept_of_block(rest, share), blocks * BLOCK))
    return torch.cat(found)


def _largest_of(rows: Tensor, count: int, first: int) -> Tensor:
    """Positions of the `count` largest of each row, ascending, where the first is `first`.

    Keys are magnitudes, then positions from the end: no two are equal in a row, so which are the
    largest does not depend on how `torch.topk` treats ties.
    """
    blocks, size = rows.shape
    starts = torch.arange(first, first + blocks * BLOCK, BLOCK, device=rows.device).view(-1, 1)
    places = torch.arange(size, device=rows.device)
    if count == size:
        return (starts + places).view(-1)
    keys = rows.to(torch.int64).bitwise_and_(_MAGNITUDE).mul_(BLOCK).add_(_LAST - places)
    kept = _LAST - keys.topk(count, dim=1, sorted=False).values.bitwise_and_(_LAST)
    return (starts + kept.sort(dim=1).values).view(-1)


def select_largest(compression: Compression, gradient: Tensor, residual: Tensor | None) -> Chosen:
    """What `Compression.compress` does, where the gradient is.

    Of a sum that is NaN the bits besides are those that the accelerator makes.

    Parameters
    ----------
    gradient : fp16, bf16 or fp32 of one dimension; it is left as it is.
    residual : fp32 on the same device, of the same size, left as it is; None is nothing.
    """
    total = gradient.to(torch.float32).contiguous()
    if compression.error_feedback and residual is not None:
        total = torch.add(residual, total)
    kept = take_largest(total, compression.share)
    wanted = total[kept]
    value = _rounded(compression, wanted)
    left: Tensor | None = None
    if compression.error_feedback:
        left = total.clone() if total.data_ptr() == gradient.data_ptr() else total
        lost = torch.full_like(wanted, float(NOTHING))
        if compression.format != "fp32":
            more = wanted - value.to(torch.float32)
            lost = torch.where(torch.isfinite(more) & (more != 0.0), more, lost)
        left[kept] = lost
    index = kept if gradient.numel() > torch.iinfo(torch.int32).max else kept.to(torch.int32)
    return Chosen(index, value, left)


def _rounded(compression: Compression, values: Tensor) -> Tensor:
    limit = compression.limit
    if limit is None:
        return values
    bounded = torch.where(torch.isinf(values), values, values.clamp(-limit, limit))
    return bounded.to(convert.DTYPES[compression.format])
