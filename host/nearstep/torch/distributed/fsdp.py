"""FSDP2's reduce-scatter on COARSE's memory devices, for a model sharded over another group."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import ReduceScatterOptions
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from nearstep.torch.distributed.hook import group_beside
from nearstep.torch.distributed.process_group import CoarseProcessGroup
from nearstep.torch.distributed.work import CoarseWork


class CoarseReduceScatter(ReduceScatter):
    """Reduces gradients on the devices' rings; the group given by FSDP is not used.

    Attributes
    ----------
    state : group of the memory devices.
    """

    def __init__(self, state: CoarseProcessGroup) -> None:
        self.state = state

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

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
        work = self.state.reduce_scatter_single(output_tensor, input_tensor, options)
        if async_op:
            return work
        work.wait()
        return None


def fsdp_reduce_scatter(
    group: dist.ProcessGroup | None = None,
    *,
    wire: str | None = None,
    timeout_s: float | None = None,
) -> CoarseReduceScatter:
    """Return a reduce-scatter for fully sharded modules.

        scatter = fsdp_reduce_scatter()
        for module in sharded:
            module.set_custom_reduce_scatter(scatter)

    All processes of the group call this function. A model sharded over a group of the memory
    devices does not need it.

    Parameters
    ----------
    group : group that the model is sharded over; None: the default group.
    wire, timeout_s : as for `ddp_hook`.
    """
    return CoarseReduceScatter(group_beside(group, wire, timeout_s))
