"""Collectives of FSDP2 through COARSE's memory devices, for a model of another process group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ReduceScatterOptions
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from nearstep.coarse.service.client import TIMEOUT_S
from nearstep.torch.distributed.hook import group_beside
from nearstep.torch.distributed.process_group import CoarseProcessGroup
from nearstep.torch.distributed.work import CoarseWork


def fsdp_collectives(
    group: dist.ProcessGroup | None = None, *, wire: str = "fp32", timeout_s: float = TIMEOUT_S
) -> tuple[CoarseAllGather, CoarseReduceScatter]:
    """All-gather and reduce-scatter for modules that are fully sharded.

        gather, scatter = fsdp_collectives()
        for module in sharded:
            module.set_custom_all_gather(gather)
            module.set_custom_reduce_scatter(scatter)

    All processes of the group call it. A model whose group is of the memory devices needs none.

    Parameters
    ----------
    group : that the model is sharded over; None is the default one.
    wire : format on the links of the devices: `fp32`, `fp16`, `bf16`.
    timeout_s : of each wait.

    Raises
    ------
    ServiceLostError : there is no service, or it did not begin.
    HandshakeError : it does not take this process.
    JobError : not all processes came in time.
    ArgumentError : an address without the file of its token.
    """
    state = group_beside(group, wire, timeout_s)
    return CoarseAllGather(state), CoarseReduceScatter(state)


class _Comm:
    """What both have: a group of the memory devices, and ordinary memory.

    Attributes
    ----------
    state : the group.
    """

    def __init__(self, state: CoarseProcessGroup) -> None:
        super().__init__()
        self.state = state

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class CoarseAllGather(_Comm, AllGather):
    """Parameters are gathered through the devices' memory; the group that FSDP names is not used.

    Raises
    ------
    JobError : from FSDP's forward and backward.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> CoarseWork | None:
        return _ended(self.state.all_gather_single(output_tensor, input_tensor), async_op)


class CoarseReduceScatter(_Comm, ReduceScatter):
    """Gradients go through the devices' rings; the group that FSDP names is not used.

    Raises
    ------
    JobError : from FSDP's backward.
    """

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> CoarseWork | None:
        options = ReduceScatterOptions()
        options.reduceOp = op
        return _ended(
            self.state.reduce_scatter_single(output_tensor, input_tensor, options), async_op
        )


def _ended(work: CoarseWork, async_op: bool) -> CoarseWork | None:
    if async_op:
        return work
    work.wait()
    return None
