"""Updates in backward without an engine: the bits of updates at the step, or a typed error before
anything is touched, after which a step can be made."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import nearstep
from nearstep.errors import ArgumentError, NearstepError
from nearstep.torch import in_backward
from nearstep.torch.errors import (
    EarlyUpdateError,
    GradientError,
    HyperparameterError,
    InterruptedStepError,
    ParameterError,
    UnsupportedOptionError,
)
from nearstep.torch.in_backward import UsedGradient

from ..driver.conftest import chosen
from ..offload.models import KINDS, WIDTH, Stack, Unlucky
from ..offload.training import bits
from .conftest import like_torch

SEED = 51407
DEVICES = {
    "host": "host:",
    "golden": "golden:axdimm?memory_bytes=4MiB",
    "dimm": "golden:axdimm?channels=2&block_bytes=512&memory_bytes=4MiB&in_place=no",
    "card": "golden:smartssd?memory_bytes=4MiB",
    "sim": "sim:axdimm?lanes=4&block_bytes=512&memory_bytes=1MiB&memory=ideal&fu=native",
}
IN_DEPTH = {"dimm", "card", "sim"}

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


@pytest.fixture(autouse=True)
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices are updated alone, and smaller parameters together."""
    monkeypatch.setattr(in_backward, "TOGETHER", WIDTH * WIDTH)


class Training:
    """A model and its optimizer, with updates in backward or at the step.

    Attributes
    ----------
    seen : losses, and what else a program compares.
    early : gradients that were used in backward.
    """

    def __init__(self, url: str, *, early: bool, kind: str = "stack", torchs: bool = False) -> None:
        torch.manual_seed(SEED)
        self.generator = torch.Generator().manual_seed(SEED)
        self.model = KINDS[kind]() if kind in KINDS else nn.Sequential(Stack(2), Unlucky(), Stack(2))
        named = [p for n, p in self.model.named_parameters() if not n.startswith("frozen.weight")]
        groups = [
            {"params": [p for p in named if p.dim() > 1], "lr": 2e-2},
            {"params": [p for p in named if p.dim() < 2]},
        ]
        kind_of = torch.optim.AdamW if torchs else nearstep.optim.AdamW
        options: dict[str, Any] = {"device": url, "updates": "in-backward" if early else "at-step"}
        self.optimizer: Any = kind_of(groups, lr=1e-2, **({"fused": True} if torchs else options))
        self.seen: list[Any] = []
        self.early = 0

    @property
    def parameters(self) -> list[Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def loss(self) -> Tensor:
        x = torch.randn(4, WIDTH, generator=self.generator)
        return self.model(x).float().square().mean()

    def backward(self) -> None:
        loss = self.loss()
        self.seen.append(loss.item())
        loss.backward()
        self.early += sum(isinstance(p.grad, UsedGradient) for p in self.parameters)

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.backward()
        self.optimizer.step()

    def steps(self) -> None:
        for _ in range(2):
            self.step()

    def state(self) -> Any:
        return bits([self.seen, self.model.state_dict(), self.optimizer.state_dict()["state"]])


def schedule(each: Training) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(each.optimizer, lambda step: 1 / (1 + step))
    for _ in range(3):
        each.step()
        scheduler.step()


def evaluate(each: Training) -> None:
    for _ in range(2):
        each.step()
        with torch.no_grad():
            each.seen.append(each.loss().item())


def closures(each: Training) -> None:
    def closure() -> float:
        each.optimizer.zero_grad()
        each.backward()
        return each.seen[-1]

    each.seen += [each.optimizer.step(closure) for _ in range(2)]


def accumulate(each: Training) -> None:
    for _ in range(2):
        each.optimizer.zero_grad()
        with each.optimizer.accumulate():
            each.backward()
            each.backward()
        each.backward()
        each.optimizer.step()


def zeros(each: Training) -> None:
    for _ in range(2):
        each.step()
        each.optimizer.zero_grad(set_to_none=False)
        each.backward()
        each.optimizer.step()
        each.optimizer.zero_grad(set_to_none=False)
        each.optimizer.step()  # of zeros
        each.model.zero_grad()


def some_have_none(each: Training) -> None:
    fixed = each.parameters[1]
    for wanted in (True, False, True, True):
        fixed.requires_grad_(wanted)
        each.step()


def thawed(each: Training) -> None:
    for p in each.parameters[:3]:
        p.requires_grad_(False)
    each.step()
    for p in each.parameters[:3]:
        p.requires_grad_(True)
    each.steps()


def by_hand(each: Training) -> None:
    for _ in range(2):
        each.optimizer.zero_grad()
        gradients = torch.autograd.grad(each.loss(), each.parameters[:3])
        for p, gradient in zip(each.parameters, gradients, strict=False):
            p.grad = gradient
        each.backward()
        each.optimizer.step()


def late_group(each: Training) -> None:
    each.optimizer.zero_grad()
    each.backward()
    more = torch.linspace(-1, 1, WIDTH * WIDTH).requires_grad_()
    more.grad = torch.ones_like(more)
    each.optimizer.add_param_group({"params": [more], "lr": 0.5})
    each.optimizer.step()
    each.optimizer.zero_grad()
    more.square().sum().backward()
    each.early += isinstance(more.grad, UsedGradient)
    each.backward()
    each.optimizer.step()
    each.seen.append(more)


def checkpoints(each: Training) -> None:
    each.step()
    saved = copy.deepcopy([each.model.state_dict(), each.optimizer.state_dict()])
    each.steps()
    each.optimizer.zero_grad()
    each.backward()  # is never followed by a step
    each.model.load_state_dict(saved[0])
    each.optimizer.load_state_dict(saved[1])
    each.steps()


def copies(each: Training) -> None:
    each.step()
    for copied in (copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))):
        each.model, each.optimizer = copied((each.model, each.optimizer))
        each.steps()


def failed(each: Training) -> None:
    """A step after backward has failed is of the gradients that there are, as in torch."""
    for where in ("backward", None, "forward"):
        each.optimizer.zero_grad()
        each.model[1].where = where
        try:
            each.backward()
        except OSError:
            each.seen.append(where)
            each.early += sum(isinstance(p.grad, UsedGradient) for p in each.parameters)
        each.optimizer.step()
    each.model[1].where = None
    each.steps()


def layouts(each: Training) -> None:
    for p in each.parameters[:2]:
        p.data = p.data.t().contiguous().t()
    each.steps()


def of_each(each: Training) -> None:
    """Clipping of each gradient by itself."""
    for p in each.parameters:
        for group in (p.grad,):
            assert group is None
    each.steps()


KIND_OF = {failed: "unlucky"}
PROGRAMS: list[Callable[[Training], None]] = [
    schedule,
    evaluate,
    closures,
    accumulate,
    zeros,
    some_have_none,
    thawed,
    by_hand,
    late_group,
    checkpoints,
    copies,
    failed,
    layouts,
]


def compared(url: str, program: Callable[[Training], None], kind: str = "stack") -> int:
    """Run a program with updates at the step and in backward; early updates."""
    plain, early = (Training(url, early=early, kind=kind) for early in (False, True))
    for each in (plain, early):
        program(each)
        each.optimizer.zero_grad()
    assert early.state() == plain.state()
    assert plain.early == 0
    print(f"seed {SEED}: {early.early} updates in backward")
    return early.early


@pytest.mark.parametrize("device", chosen(DEVICES, IN_DEPTH))
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_programs_have_the_bits_of_updates_at_the_step(program: Any, device: str) -> None:
    assert compared(DEVICES[device], program, KIND_OF.get(program, "stack")) > 0


@pytest.mark.parametrize("device", chosen(DEVICES, IN_DEPTH))
@pytest.mark.parametrize("kind", KINDS)
def test_models_have_the_bits_of_updates_at_the_step(kind: str, device: str) -> None:
    assert compared(DEVICES[device], schedule, kind) > 0


@like_torch
def test_bits_are_those_of_torch() -> None:
    both = [Training("host:", early=True), Training("", early=False, torchs=True)]
    for each in both:
        schedule(each)
    assert both[0].state() == both[1].state()
    assert both[0].early > 0
