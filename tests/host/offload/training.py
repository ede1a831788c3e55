"""One training of a model, plain or offloaded, and what is left of it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nearstep
from nearstep.torch.offload import Report
from nearstep.torch.offload.errors import BudgetError

from . import accelerator
from .models import KINDS, WIDTH

GOLDEN = "golden:axdimm?memory_bytes=2MiB&rules=adam,sgd,sgd_momentum,adagrad"

SEED = 40127

if os.environ.get("NEARSTEP_TEST_COMPUTE") == "accel":
    accelerator.load()
COMPUTE = torch.device(os.environ.get("NEARSTEP_TEST_COMPUTE", "cpu"))
"""What layers compute on."""

NOT_ON_ACCEL = {"recurrent", "convolutions"}

Make = Callable[[Any, str], torch.optim.Optimizer]


def computes(kind: str) -> bool:
    """Whether `COMPUTE` has the operations of a kind of model."""
    return COMPUTE.type != "accel" or kind not in NOT_ON_ACCEL


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Two groups: matrices, and what has fewer dimensions."""
    named = [(n, p) for n, p in model.named_parameters() if not n.startswith("frozen.weight")]
    return [
        {"params": [p for _, p in named if p.dim() > 1], "lr": 2e-2},
        {"params": [p for _, p in named if p.dim() < 2]},
    ]


OPTIMIZERS: dict[str, Make] = {
    "adamw": lambda p, on: nearstep.optim.AdamW(p, lr=1e-2, device=on),
    "sgd": lambda p, on: nearstep.optim.SGD(p, lr=1e-2, device=on),
    "momentum": lambda p, on: nearstep.optim.SGD(p, lr=1e-2, momentum=0.9, device=on),
    "maximize": lambda p, on: nearstep.optim.Adam(p, lr=1e-3, maximize=True, device=on),
    "adagrad": lambda p, on: nearstep.optim.Adagrad(p, lr=1e-2, device=on),
}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How to train.

    Attributes
    ----------
    kind, optimizer : names.
    steps
    passes : forward and backward passes for each step.
    evaluates : a forward without gradients between steps.
    keeps : gradients are not reset between steps.
    schedules : a scheduler changes the learning rate after each step.
    device
    seed
    """

    kind: str
    optimizer: str = "adamw"
    steps: int = 2
    passes: int = 1
    evaluates: bool = False
    keeps: bool = False
    schedules: bool = False
    device: str = GOLDEN
    seed: int = SEED


@dataclass
class Result:
    """What a training leaves.

    Attributes
    ----------
    losses
    model : its state.
    optimizer : its state.
    gradients
    report : of the engine, if there was one.
    """

    losses: list[float]
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    gradients: list[Tensor | None]
    report: Report | None = field(default=None, compare=False)


def made(plan: Plan) -> tuple[nn.Module, Any]:
    """A new model and its optimizer: the same for equal plans."""
    if not computes(plan.kind):
        pytest.skip(f"{plan.kind}: torch computes that on no accelerator but its own")
    torch.manual_seed(plan.seed)
    model = KINDS[plan.kind]().to(COMPUTE)
    return model, OPTIMIZERS[plan.optimizer](groups(model), plan.device)


def train(plan: Plan, /, *, platform: str | None = None, **offload: Any) -> Result:
    """Train; offloaded, if a budget and the like are given, and recorded on a platform."""
    model, optimizer = made(plan)
    with nearstep.offload(model, optimizer, **offload) if offload else nullcontext() as engine:
        recorded = engine and platform and COMPUTE.type == "cpu"
        with engine.record(platform) if recorded else nullcontext():
            losses = run(plan, model, optimizer)
        report = engine.report() if engine else None
        state, moments = model.state_dict(), optimizer.state_dict()
    return Result(losses, state, moments, [p.grad for p in model.parameters()], report)


def run(plan: Plan, model: nn.Module, optimizer: Any) -> list[float]:
    """The loop, which knows of no engine."""
    generator = torch.Generator().manual_seed(plan.seed)
    scheduler = None
    if plan.schedules:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    losses = []
    for _ in range(plan.steps):
        if not plan.keeps:
            optimizer.zero_grad()
        for _ in range(plan.passes):
            x = torch.randn(4, WIDTH, generator=generator).to(COMPUTE)
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        if plan.evaluates:
            with torch.no_grad():
                x = torch.randn(4, WIDTH, generator=generator).to(COMPUTE)
                losses.append(model(x).sum().item())
    return losses


def train_in_least(plan: Plan, /, **offload: Any) -> Result:
    """Train with the smallest budget that the errors of smaller ones name."""
    tried = []
    budget: int | None = 1
    for _ in range(20):
        assert budget is not None
        tried.append(budget)
        try:
            return train(plan, budget=budget, **offload)
        except BudgetError as error:
            budget = error.expected if error.expected > error.actual else None
    raise AssertionError(f"no budget is enough: {tried}")


def budget_of(result: Result) -> int:
    """The budget of a training that was offloaded."""
    assert result.report is not None
    return result.report.budget


def bits(value: Any) -> Any:
    """Anything made of tensors, as what can be compared bit for bit."""
    if isinstance(value, Tensor):
        raw = value.detach().cpu().reshape(-1).view(torch.uint8)  # numpy has no bf16
        return tuple(value.shape), str(value.dtype), raw.numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(each) for key, each in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [bits(each) for each in value]
    return value


def assert_all_equal(found: Sequence[Result], plain: Result, plan: Plan) -> int:
    """Offloaded trainings have the bits of a plain one, within their budgets; how many."""
    for each in found:
        assert_equal(each, plain)
        assert each.report is not None
        assert each.report.peak <= each.report.budget, plan
    return len(found)


def assert_equal(found: Result, plain: Result) -> None:
    """Everything is equal, bit for bit."""
    assert found.losses == plain.losses
    assert bits(found.model) == bits(plain.model)
    assert bits(found.optimizer) == bits(plain.optimizer)
    assert bits(found.gradients) == bits(plain.gradients)
