"""Training in each of several processes whose optimizer is in the memory devices."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from nearstep.coarse.service.errors import RefusedError
from nearstep.errors import ArgumentError, DtypeError
from nearstep.torch.distributed import StorageOptimizer, restore_snapshot, save_snapshot
from nearstep.torch.distributed.rendezvous import DEVICE

GROUPS: tuple[dict[str, Any], ...] = ({"lr": 0.05}, {"lr": 0.01, "weight_decay": 0.2})
COMMON: dict[str, Any] = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.0}
LARGE_BYTES = 80 << 20
"""More than a device has."""
NOWHERE = "/dev/null/state"
"""A path below a file."""
DECAY = 0.5
"""Of the learning rates, by a scheduler, from step to step."""


@dataclass(frozen=True)
class Result:
    """Of one process: by step and group, gradients and then parameters, in one dimension."""

    first: list[NDArray[np.float32]]
    gradients: list[list[NDArray[np.float32]]]
    parameters: list[list[NDArray[np.float32]]]


def model_of(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(13, 33), nn.Tanh(), nn.Linear(33, 5))


def groups_of(model: nn.Sequential) -> list[dict[str, Any]]:
    return [
        {"params": list(model[i].parameters()), **g} for i, g in zip((0, 2), GROUPS, strict=True)
    ]


def flat(model: nn.Sequential, *, grad: bool = False) -> list[NDArray[np.float32]]:
    return [
        torch.cat([(p.grad if grad else p.detach()).reshape(-1) for p in model[i].parameters()])
        .numpy()
        .copy()
        for i in (0, 2)
    ]


def train(device: str, steps: int, folder: str | None = None, resumed: bool = False) -> Result:
    """Steps from the beginning, or from the first one behind a snapshot."""
    os.environ[DEVICE] = device
    rank = dist.get_rank()
    model = model_of(rank + 10 * resumed)  # those of rank 0 become everybody's
    optimizer = StorageOptimizer(groups_of(model), "adamw", **COMMON)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, DECAY)
    first, gradients, parameters = flat(model), [], []
    data = torch.Generator().manual_seed(rank)
    for step in range(steps):
        x = torch.randn(7, 13, generator=data)
        if resumed and step == 0:
            assert folder is not None
            optimizer.load(f"{folder}/state")
            scheduler.step()
            continue
        optimizer.zero_grad()
        model(x).square().sum().backward()
        gradients.append(flat(model, grad=True))
        optimizer.step()
        scheduler.step()
        parameters.append(flat(model))
        if folder is not None and step == 0:
            optimizer.save(f"{folder}/state")
    assert not optimizer.state
    assert not optimizer.state_dict()["state"]
    return Result(first, gradients, parameters)


def refused(device: str) -> int:
    """What cannot be; the number of checks."""
    os.environ[DEVICE] = device
    one = torch.zeros(4, requires_grad=True)
    with pytest.raises(DtypeError, match="float32"):
        StorageOptimizer([one.detach().double().requires_grad_()], lr=0.1)
    with pytest.raises(ArgumentError, match="contiguous"):
        StorageOptimizer([torch.zeros(4, 4).t().requires_grad_()], lr=0.1)
    sharded = distribute_tensor(torch.zeros(4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(ArgumentError, match=r"whole on each process, not spread by \[Shard"):
        StorageOptimizer([sharded.requires_grad_()], lr=0.1)
    optimizer = StorageOptimizer([one], "adamw", lr=0.1)
    with pytest.raises(ArgumentError, match="not added"):
        optimizer.add_param_group({"params": [torch.zeros(3, requires_grad=True)]})
    optimizer.step()  # no gradient: as if it were 0
    assert (one == 0).all()

    def closure() -> float:
        one.grad = torch.ones(4)
        return 2.5

    assert optimizer.step(closure) == 2.5
    assert (one < 0).all()
    group = optimizer._processes
    for refused_one in (
        partial(optimizer.save, NOWHERE),
        partial(optimizer.load, NOWHERE),
        partial(save_snapshot, group, NOWHERE, {"one": one}),
        partial(restore_snapshot, group, NOWHERE),
    ):
        with pytest.raises(RefusedError, match="state"):  # at every rank, and none waits
            refused_one()
    rank = dist.get_rank()
    odd: Any = {"step": 3}
    with pytest.raises(RefusedError if rank else AttributeError, match="'int' object has no"):
        save_snapshot(group, NOWHERE, odd)
    said = torch.full((256,), 1.0 + rank)
    group.broadcast(said, 0).wait()  # the group is in step
    assert (said == 1).all()
    before = one.detach().clone()
    optimizer.step(closure)
    assert (one < before).all()
    group.allreduce(summed := torch.ones(LARGE_BYTES // 4)).wait()  # more than a device has
    assert (summed == 2).all()
    group.allreduce(found := torch.ones(3)).wait()
    assert (found == 2).all()
    one.grad = torch.ones(4)
    two = torch.zeros(4, requires_grad=True)
    both = StorageOptimizer([{"params": [one]}, {"params": [two]}], "sgd", key="both", lr=0.5)
    both.param_groups[1]["lr"] = -1.0
    before = one.detach().clone()
    with pytest.raises(RefusedError, match="lr must be finite and not negative"):
        both.step()
    assert (one == before).all()  # no group was stepped
    both.param_groups[1]["lr"] = 1.0
    both.step()
    assert (one == before - 0.5).all()
    return 19
