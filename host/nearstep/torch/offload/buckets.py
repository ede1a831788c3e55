"""Buckets in which workers average gradients, laid out as in torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from nearstep.torch.offload.compute_copy import ComputeCopy

Assignment = Sequence[Sequence[int]]
"""Indices of parameters by bucket, in the order in which buckets are averaged."""


def first_buckets(ddp: DistributedDataParallel, parameters: Sequence[Tensor]) -> Assignment:
    """Those of the first iteration.

    Without `find_unused_parameters` torch has one bucket of all gradients there, unless it is given
    `bucket_cap_mb_list`.
    """
    limits, _ = _config(ddp).compute_bucket_size_limits(
        static_graph=False, find_unused_parameters=ddp.find_unused_parameters
    )
    return assigned(parameters, limits)[::-1]


def later_buckets(
    ddp: DistributedDataParallel,
    parameters: Sequence[Tensor],
    order: Sequence[int],
    device: torch.device,
) -> Assignment:
    """Those of the iterations after, for gradients that came in this order; the same on all
    workers, those of the first.

    Parameters
    ----------
    order : of indices.
    device : of what workers send each other.
    """
    config = _config(ddp)
    _, limits = config.compute_bucket_size_limits(static_graph=False, find_unused_parameters=False)
    limits = limits or [config.first_bucket_bytes_cap, config.bucket_bytes_cap]
    found = assigned([parameters[index] for index in order], limits, order)
    rows = [(index, number) for number, bucket in enumerate(found) for index in bucket]
    table = torch.tensor(rows, device=device)
    dist.broadcast(table, group=ddp.process_group, group_src=0)
    shared: list[list[int]] = []
    for index, number in table.tolist():
        shared += [[]] * (number + 1 - len(shared))
        shared[number] = [*shared[number], index]
    return shared


def assigned(
    parameters: Sequence[Tensor], limits: Sequence[int], order: Sequence[int] = ()
) -> list[list[int]]:
    """Torch's own assignment: a bucket has gradients of one dtype, and is full at its limit."""
    torch_dist: Any = dist
    indices: list[list[int]]
    indices, _ = torch_dist._compute_bucket_assignment_by_size(
        list(parameters), list(limits), [False] * len(parameters), list(order)
    )
    return indices


def largest_bucket(tensors: Sequence[Tensor], buckets: Assignment, direct: set[Tensor]) -> int:
    """Bytes on the compute device of the largest one.

    Parameters
    ----------
    tensors : all parameters.
    direct : those whose gradients are written to the host.
    """
    return max(
        (
            sum(tensors[index].numel() * tensors[index].element_size() for index in bucket)
            for bucket in buckets
            if not all(tensors[index] in direct for index in bucket)
        ),
        default=0,
    )


def _config(ddp: DistributedDataParallel) -> Any:
    found: Any = ddp._bucket_config
    return found


class Bucket:
    """Gradients that are averaged in one go, as one tensor on the compute device.

    Parameters
    ----------
    copies : of parameters of one dtype, in their order.

    Attributes
    ----------
    nbytes : on the compute device; 0 if all gradients in it are written to the host.
    buffer : the tensor, (elements,), while there is one.
    pending : how many gradients it waits for.
    absent : of which parameters this worker has made no gradient.
    """

    def __init__(self, copies: Sequence[ComputeCopy]) -> None:
        self.copies = copies
        self._offsets: dict[ComputeCopy, int] = {}
        self._elements = 0
        for copy in copies:
            self._offsets[copy] = self._elements
            self._elements += copy.like.numel()
        on_host = all(copy.in_place.spares_gradient for copy in copies)
        self.nbytes = 0 if on_host else self._elements * copies[0].like.element_size()
        self.buffer: Tensor | None = None
        self.reset()

    def reset(self) -> None:
        """Wait for all gradients."""
        self.buffer = None
        self.pending = len(self.copies)
        self.absent: list[ComputeCopy] = []

    def open(self) -> None:
        """Make the tensor."""
        with torch.inference_mode(False):
            first = self.copies[0]
            device = first.parameter.device
            self.buffer = torch.empty(self._elements, dtype=first.like.dtype, device=device)

    def view(self, copy: ComputeCopy) -> Tensor:
        """The part of a parameter, of its shape."""
        assert self.buffer is not None, "it is open"
        like, offset = copy.like, self._offsets[copy]
        if torch.ops.aten.is_non_overlapping_and_dense(like):
            return self.buffer.as_strided(like.size(), like.stride(), offset)
        return self.buffer.narrow(0, offset, like.numel()).view(like.size())
