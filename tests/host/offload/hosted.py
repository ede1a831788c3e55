"""Collectives on tensors of the fake accelerator: gloo's, on copies in the host's memory.

It stands for gloo on CUDA, which copies tensors to the host and back by itself, and for NCCL, which
has no such copies; both leave the sum in the tensor that they got.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

NAME = "hosted"


class HostedGroup(dist.ProcessGroup):
    """A process group of any device, by way of gloo's."""

    def __init__(self, gloo: Any, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._gloo = gloo

    def allreduce(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._there(tensors, self._gloo.allreduce, options or dist.AllreduceOptions())

    def broadcast(self, tensors: list[Tensor], options: Any = None) -> Any:
        return self._there(tensors, self._gloo.broadcast, options or dist.BroadcastOptions())

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], _: Any = None) -> Any:
        hosts = [[each.cpu() for each in own] for own in outputs]
        self._gloo.allgather(hosts, [each.cpu() for each in inputs]).wait()
        for own, host in zip(outputs, hosts, strict=True):
            for each, found in zip(own, host, strict=True):
                each.copy_(found)
        return _done(outputs)

    def _there(self, tensors: list[Tensor], collective: Any, options: Any) -> Any:
        hosts = [each.cpu() for each in tensors]
        collective(hosts, options).wait()
        for each, host in zip(tensors, hosts, strict=True):
            if host is not each:
                each.copy_(host)
        return _done(tensors)


def _done(result: Any) -> Any:
    future: Future[Any] = Future()
    future.set_result(result)
    return _create_work_from_future(future)


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> HostedGroup:
    return HostedGroup(dist.ProcessGroupGloo(store, rank, size, timeout), rank, size)


def register() -> None:
    """Have `init_process_group` know it, in this process."""
    dist.Backend.register_backend(NAME, _create, devices=["cpu", "accel"])
