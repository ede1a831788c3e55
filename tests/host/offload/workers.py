"""Several processes that train together, each with a device, an optimizer and an engine."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nearstep

from ...processes import on_processes
from . import accelerator, hosted
from .models import KINDS, WIDTH
from .plans import drawn
from .training import (
    COMPUTE,
    Plan,
    Result,
    assert_equal,
    bits,
    budget_of,
    in_least,
    made,
    train_made,
)

PRELOADED = ["pytest", "nearstep.optim", "nearstep.torch.offload", "nearstep.torch.memferry"]
"""What takes seconds to import: one process does, and workers are its forks."""

TIMEOUT_S = 120.0
"""Of a collective, and of all that workers do in one test."""


ALL_GRADIENTS = 4 * 5 * WIDTH * (WIDTH + 1)
"""Bytes of all gradients of `Branches`."""


class Branches(nn.Module):
    """Layers of which each worker uses others in each step, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.branches = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.nobody = nn.Linear(WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found = self.branches[(self.calls + dist.get_rank()) % 2]
        return found(torch.relu(self.first(x)))


class Backwards(nn.Module):
    """Layers that are used in the reverse order of registration: all gradients but the last one
    wait to be averaged."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for layer in reversed(self.layers):
            x = torch.tanh(layer(x))
        return x


@dataclass(frozen=True, kw_only=True)
class Case:
    """How workers train.

    Attributes
    ----------
    plan : passes but the last one of a step are `no_sync`.
    wrapper : options of torch's.
    offload : options of nearstep's, without a budget.
    share : budget, as a multiple of the smallest.
    places : seed of a MemFerry plan; None is another policy.
    platform : of a recording.
    """

    plan: Plan
    wrapper: dict[str, Any]
    offload: dict[str, Any] = field(default_factory=dict)
    share: float = 1.0
    places: int | None = None
    platform: str | None = None

    @property
    def differs(self) -> bool:
        """Whether workers use different parameters."""
        return self.plan.kind == "branches"


def train(case: Case, budget: int | None = None) -> Result:
    """Train as one of the workers; offloaded, with a budget."""
    seed = case.plan.seed + 1000 * dist.get_rank()  # DDP broadcasts rank 0's
    plan = replace(case.plan, seed=seed)
    model, optimizer = made(plan)
    ddp = DistributedDataParallel(model, **case.wrapper)
    engine = None
    if budget is not None:
        options = dict(case.offload)
        if case.places is not None:
            options |= {"policy": "memferry", "plan": drawn(model, random.Random(case.places))}
        engine = nearstep.offload(ddp, optimizer, budget=budget, **options)
    return train_made(plan, model, optimizer, engine, case.platform, ddp)


def train_in_least(case: Case) -> Result:
    """Train with the smallest budget that the errors of smaller ones name, the same everywhere.

    Where workers do not all do the same, it has room for all gradients besides.
    """

    def agreed(budget: int) -> int:
        found = torch.tensor([budget + (ALL_GRADIENTS if case.differs else 0)])
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return int(found)

    return in_least(lambda budget: train(case, budget), agreed)


def compare(cases: list[Case]) -> list[Any]:
    """Of each case, parameters and moments of a worker at the end, and the engine's report, after
    all was found equal to training with torch's DistributedDataParallel alone."""
    found = []
    for case in cases:
        names = [name for name, _ in made(case.plan)[0].named_parameters()]
        plain = train(case)
        least = train_in_least(case)
        for each in (least, train(case, int(budget_of(least) * case.share))):
            assert_equal(each, plain)
            assert each.report is not None
            assert each.report.peak <= each.report.budget, case
            parameters = bits([each.model[name] for name in names])
            found.append((parameters, bits(each.optimizer), each.report))
    return found


def on_workers(
    count: int, function: Callable[..., Any], *args: Any, timeout_s: float = TIMEOUT_S
) -> list[Any]:
    """What a function returns in each of several processes, which are of one group."""
    return on_processes(
        count, _checked, function, *args, backend=_backend, preloaded=PRELOADED, timeout_s=timeout_s
    )


def _backend() -> str:
    KINDS.update(branches=Branches, backwards=Backwards)  # in this process alone
    if COMPUTE.type != "accel":
        return "gloo"
    hosted.register()
    return hosted.NAME


def _checked(function: Callable[..., Any], *args: Any) -> Any:
    found = function(*args)
    assert COMPUTE.type != "accel" or accelerator.hazards() == []
    return found
