"""Random sequences of everything that training code does, against torch's fused optimizers."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch

import nearstep

from .conftest import late_adagrad, like_torch, on_all

SHAPES = [(16,), (8, 16), (2, 3, 16), (32, 48), (64,)]


@dataclass(frozen=True)
class Kind:
    """An optimizer, what differs between groups, and its moments.

    Of SGD each parameter has a group to itself: torch's fused step raises TypeError where some
    parameters of a group have a momentum buffer and others start.
    """

    name: str
    groups: tuple[dict[str, Any], ...]
    late: dict[str, Any]
    moments: tuple[str, ...]
    alone: bool = False

    def split(self, parameters, at):
        parts = ([p] for p in parameters) if self.alone else (parameters[:at], parameters[at:])
        return [
            {"params": part, **self.groups[index % len(self.groups)]}
            for index, part in enumerate(parts)
        ]

    def pair(self):
        """Factories of nearstep's optimizer and of torch's, of groups and a device."""
        return (
            lambda groups, device: getattr(nearstep.optim, self.name)(groups, device=device),
            lambda groups, device: getattr(torch.optim, self.name)(groups, fused=True),
        )


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 6))]

KINDS = (
    Kind(
        "AdamW",
        ({"lr": 1e-2}, {"weight_decay": 0.3}),
        {"betas": (0.8, 0.99)},
        ("exp_avg", "exp_avg_sq"),
    ),
    Kind(
        "SGD",
        (
            {"lr": 0.1, "momentum": 0.9},
            {"lr": 0.05, "weight_decay": 0.1},
            {"lr": 0.05, "momentum": 0.5, "nesterov": True},
        ),
        {"lr": 0.2, "momentum": 0.8, "dampening": 0.5},
        ("momentum_buffer",),
        alone=True,
    ),
    pytest.param(
        Kind(
            "Adagrad", ({"lr": 0.1, "lr_decay": 0.1}, {"weight_decay": 0.1}), {"lr": 0.3}, ("sum",)
        ),
        marks=late_adagrad,
    ),
)


class Pair:
    """The same training with nearstep and with torch; every action is done to both."""

    def __init__(self, kind, device, seed):
        self.kind = kind
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        start = [torch.randn(shape, generator=self.generator) for shape in SHAPES]
        self.lists = [[p.clone().requires_grad_() for p in start] for _ in range(2)]
        split = self.random.randrange(1, len(SHAPES) - 1)
        self.optimizers = [
            factory(kind.split(ps[:-1], split), device)
            for factory, ps in zip(kind.pair(), self.lists, strict=True)
        ]
        self.late = False

    def step(self):
        skipped = self.random.sample(range(len(SHAPES)), self.random.choice([0, 0, 1, 2]))
        gradients = [torch.randn(shape, generator=self.generator) for shape in SHAPES]
        for parameters, optimizer in zip(self.lists, self.optimizers, strict=True):
            for index, p in enumerate(parameters):
                p.grad = None if index in skipped else gradients[index].clone()
            optimizer.step()

    def change_parameter(self):
        index = self.random.randrange(len(SHAPES))
        how = self.random.randrange(3)
        for parameters in self.lists:
            p = parameters[index]
            if how == 0:
                with torch.no_grad():
                    p.clamp_(-0.5, 0.5)
            elif how == 1:
                p.data.mul_(0.9)
            else:
                p.data = p.data + 0.125

    def change_moment(self):
        index = self.random.randrange(len(SHAPES))
        key = self.random.choice(self.kind.moments)
        for parameters, optimizer in zip(self.lists, self.optimizers, strict=True):
            if parameters[index] in optimizer.state:
                optimizer.state[parameters[index]][key].mul_(0.5)

    def change_rate(self):
        factor = self.random.choice([0.5, 0.9, 1.5])
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] *= factor

    def add_group(self):
        if not self.late:
            for parameters, optimizer in zip(self.lists, self.optimizers, strict=True):
                optimizer.add_param_group({"params": [parameters[-1]], **self.kind.late})
            self.late = True

    def read_state(self):
        for optimizer in self.optimizers:
            copy.deepcopy(optimizer.state_dict())

    def reload(self):
        for optimizer in self.optimizers:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def exchange(self):
        """Each goes on from the other's checkpoint."""
        saved = [copy.deepcopy(optimizer.state_dict()) for optimizer in self.optimizers]
        for optimizer, other in zip(self.optimizers, reversed(saved), strict=True):
            optimizer.load_state_dict(other)

    def duplicate(self):
        """Go on with a copy; the original is dropped."""
        for index in range(2):
            both = copy.deepcopy((self.lists[index], self.optimizers[index]))
            self.lists[index], self.optimizers[index] = both

    def reset_state(self):
        index = self.random.randrange(len(SHAPES))
        for parameters, optimizer in zip(self.lists, self.optimizers, strict=True):
            optimizer.state.pop(parameters[index], None)

    def check(self):
        """Compare everything; returns the number of values compared."""
        compared = 0
        for a, b in zip(*self.lists, strict=True):
            assert torch.equal(a.view(torch.int32), b.view(torch.int32))
            mine, other = (o.state.get(p) for o, p in zip(self.optimizers, (a, b), strict=True))
            assert (mine is None) == (other is None)
            compared += a.numel()
            if mine is not None:
                assert list(mine) == list(other)
                for key, value in other.items():
                    assert torch.equal(mine[key].view(torch.int32), value.view(torch.int32)), key
                    compared += value.numel()
        return compared


@like_torch
@on_all("many_rules")
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_random_use_equals_torch(kind, seed, many_rules):
    pair = Pair(kind, many_rules, seed)
    actions = [
        pair.change_parameter,
        pair.change_moment,
        pair.change_rate,
        pair.add_group,
        pair.read_state,
        pair.reload,
        pair.exchange,
        pair.duplicate,
        pair.reset_state,
    ]
    compared, done = 0, []
    for _ in range(25):
        pair.step()
        if pair.random.random() < 0.6:
            action = pair.random.choice(actions)
            done.append(action.__name__)
            action()
        if pair.random.random() < 0.5:
            compared += pair.check()
    compared += pair.check()
    print(f"seed {seed}: {compared} values compared; {', '.join(done)}")
    assert compared > 0
