"""What is left of a group when a process or the service ends: programs of each process."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

from nearstep.torch.distributed import ddp_hook, dual_hook
from nearstep.torch.distributed.rendezvous import FOUND

WIDTH = 24
STOPPED_S = 2.0
"""Bound of a wait for a process that was stopped."""

FAULTS = ("kill", "raise", "stop", "service", "abort")
KINDS = ("ddp", "buffers", "no_sync", "static_graph", "hook", "dual", "fsdp1", "fsdp2")
"""Ways to train whose collectives run in C++, in a hook, in forward or in backward."""


class Model:
    """A model of one kind, with a group of its own, that has made two steps."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.group: Any = dist.new_group()
        norm = nn.BatchNorm1d(WIDTH) if kind == "buffers" else nn.Identity()
        model: Any = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH))
        if kind == "fsdp1":
            cpu = torch.device("cpu")
            self.model: Any = FullyShardedDataParallel(model, self.group, device_id=cpu)
        elif kind == "fsdp2":
            mesh = dist.DeviceMesh.from_group(self.group, "cpu")
            self.model = fully_shard(model, mesh=mesh)
        else:
            self.model = DistributedDataParallel(
                model,
                process_group=self.group,
                bucket_cap_mb=0.001,
                static_graph=kind == "static_graph",
            )
            if kind == "hook":
                self.model.register_comm_hook(*ddp_hook(self.group))
            elif kind == "dual":
                self.model.register_comm_hook(*dual_hook(self.group, m=4096))
        for _ in range(2):
            self.forward().backward()

    def forward(self) -> Tensor:
        if self.kind == "no_sync":
            with self.model.no_sync():
                self.model(torch.randn(3, WIDTH)).sum().backward()
        loss: Tensor = self.model(torch.randn(3, WIDTH)).sum()
        return loss


def survive(fault: str) -> list[tuple[str, str]]:
    """The last process ends or is stopped after forward: what backward, and then a whole step,
    raise in the others, by kind."""
    last = dist.get_world_size() - 1
    models = [Model(kind) for kind in KINDS]
    losses = [each.forward() for each in models]
    pids: list[Any] = [None] * (last + 1)
    dist.all_gather_object(
        pids, (os.getpid(), None if FOUND.spawned is None else FOUND.spawned.pid)
    )
    gate = dist.new_group(backend="gloo")
    dist.barrier(group=gate)
    if dist.get_rank() == last:
        end(fault, models)
    elif fault == "stop":
        for each in models:
            each.group.set_timeout(timedelta(seconds=STOPPED_S))
    if fault == "service" and dist.get_rank() == 0:
        os.kill(pids[0][1], signal.SIGKILL)
    found = []
    for model, loss in zip(models, losses, strict=True):
        found.append((f"backward of {model.kind}", what_raises(loss.backward)))
        found.append((f"step of {model.kind}", what_raises(lambda m=model: m.forward().backward())))
    if fault == "stop" and dist.get_rank() == 0:
        os.kill(pids[last][0], signal.SIGKILL)
    return found


def end(fault: str, models: list[Model]) -> None:
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "raise":
        os._exit(1)
    elif fault == "abort":
        for each in models:
            each.group.abort()


def what_raises(action: Callable[[], None]) -> str:
    try:
        action()
    except RuntimeError as error:
        return str(error)
    return "nothing"
