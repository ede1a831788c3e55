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
from nearstep.torch.offload import Engine, Report
from nearstep.torch.offload.errors import BudgetError

from . import accelerator
from .models import KINDS, WIDTH

GOLDEN = "golden:axdimm?memory_bytes=2MiB&rules=adam,sgd,sgd_momentum,adagrad"

HOST = "host:"
"""The processor, which a plain training has on the CPU alone."""

SEED = 40127

if os.environ.get("NEARSTEP_TEST_COMPUTE") == "accel":
    accelerator.load()
COMPUTE = torch.device(os.environ.get("NEARSTEP_TEST_COMPUTE", "cpu"))
"""What layers compute on."""

CPU = torch.device("cpu")

NOT_ON_ACCEL = {"recurrent", "convolutions"}

Make = Callable[[Any, str], torch.optim.Optimizer]
Made = tuple[Any, Any]
"""A model and its optimizer."""


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
    passes : forward and backward passes for each step.
    evaluates : a forward without gradients between steps.
    keeps : gradients are not reset between steps.
    schedules : a scheduler changes the learning rate after each step.
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
    """What a training leaves: states, and a report if there was an engine."""

    losses: list[float]
    model: dict[str, Tensor]
    optimizer: dict[str, Any]
    gradients: list[Tensor | None]
    report: Report | None = field(default=None, compare=False)


def made(plan: Plan) -> tuple[nn.Module, Any]:
    """A new model and its optimizer: the same for equal plans."""
    if not computes(plan.kind):
        pytest.skip(f"{plan.kind}: torch computes that on no accelerator but its own")
    if plan.device == HOST and COMPUTE.type != "cpu":
        pytest.skip("host: without an engine updates tensors on the CPU: nothing to compare with")
    torch.manual_seed(plan.seed)
    model = KINDS[plan.kind]().to(COMPUTE)
    return model, OPTIMIZERS[plan.optimizer](groups(model), plan.device)


def train(plan: Plan, /, *, platform: str | None = None, **offload: Any) -> Result:
    """Train; offloaded, if a budget and the like are given, and recorded on a platform."""
    model, optimizer = made(plan)
    engine = nearstep.offload(model, optimizer, **offload) if offload else None
    return train_made(plan, model, optimizer, engine, platform)


def train_made(
    plan: Plan,
    model: nn.Module,
    optimizer: Any,
    engine: Engine | None = None,
    platform: str | None = None,
    called: nn.Module | None = None,
) -> Result:
    """Train a model, by itself or as `called` calls it, and close its engine."""
    recorded = engine and platform and COMPUTE.type == "cpu"
    with engine or nullcontext():
        with engine.record(platform) if recorded else nullcontext():
            losses = run(plan, called or model, optimizer)
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
        for left in reversed(range(plan.passes)):
            with getattr(model, "no_sync", nullcontext)() if left else nullcontext():
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


def in_least(train: Callable[[int], Any], agreed: Callable[[int], int] = int) -> Any:
    """Train with the smallest budget that the errors of smaller ones name."""
    tried = [1]
    while len(tried) < 20:
        try:
            return train(tried[-1])
        except BudgetError as error:
            budget = agreed(error.expected)
        assert budget > tried[-1], tried
        tried.append(budget)
    raise AssertionError(f"no budget is enough: {tried}")


def train_in_least(plan: Plan, /, **offload: Any) -> Result:
    """Train with the smallest budget there is."""
    return in_least(lambda budget: train(plan, budget=budget, **offload))


def stack(
    count: int = 4,
    width: int = WIDTH,
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
    on: torch.device = COMPUTE,
    **options: Any,
) -> Made:
    """Equal layers and AdamW, with options of it."""
    torch.manual_seed(SEED)
    layers = (nn.Linear(width, width, bias=bias) for _ in range(count))
    model = nn.Sequential(*layers).to(on, dtype)
    options = {"lr": 1e-2, "device": GOLDEN, **options}
    return model, nearstep.optim.AdamW(model.parameters(), **options)


def loss_of(model: nn.Module, seed: int = 0, rows: int = 4) -> Tensor:
    """A loss of random rows."""
    like = next(model.parameters())
    width = like.shape[-1]
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))
    return model(x.to(like.device, like.dtype)).float().square().mean()


def step(model: nn.Module, optimizer: Any, seed: int = 0, rows: int = 4) -> float:
    """A step of its own; the loss before it."""
    optimizer.zero_grad()
    loss = loss_of(model, seed, rows)
    loss.backward()
    optimizer.step()
    return loss.item()


def steps(model: nn.Module, optimizer: Any, count: int = 2, seed: int = 0) -> list[float]:
    """Steps, each with a seed of its own; their losses."""
    return [step(model, optimizer, seed + number) for number in range(count)]


def state_of(model: nn.Module, optimizer: Any) -> Any:
    """Bits of both."""
    return bits([model.state_dict(), optimizer.state_dict()])


def alike(use: Callable[..., Any], make: Callable[[], Made] = stack, **offload: Any) -> None:
    """Use a plain and an offloaded model in one way: all bits are equal, within the budget.

    `use` gets a model, its optimizer, and the engine or None.
    """
    found = []
    for offloads in (False, True):
        model, optimizer = make()
        engine = nearstep.offload(model, optimizer, **offload) if offloads else None
        with engine or nullcontext():
            seen = [bits(use(model, optimizer, engine)), state_of(model, optimizer)]
            assert engine is None or engine.report().peak <= engine.budget
        gradients = bits([p.grad for p in model.parameters()])
        found.append([seen, gradients, state_of(model, optimizer)])
    assert found[0] == found[1]


def assert_like_plain(
    model: nn.Module, optimizer: Any, make: Callable[[], Made] = stack, count: int = 2
) -> None:
    """A plain model has the same state after so many steps."""
    plain = make()
    steps(*plain, count)
    assert state_of(model, optimizer) == state_of(*plain)


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
