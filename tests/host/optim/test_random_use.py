"""Random sequences of everything that training code does, against torch's fused optimizers."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from .beside import Beside, Side, tensors
from .conftest import HOMES, late_adagrad, like_torch
from .test_beside_torch import swap

SHAPES = [(16,), (8, 16), (2, 3, 16), (32, 48), (64,)]
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 6))]

GROUPS: dict[str, tuple[tuple[dict[str, Any], ...], dict[str, Any]]] = {
    "AdamW": (({}, {"weight_decay": 0.3}), {"betas": (0.8, 0.99)}),
    "momentum": (
        (
            {"weight_decay": 0.0},
            {"momentum": 0.0, "lr": 0.05, "weight_decay": 0.1},
            {"momentum": 0.5, "lr": 0.05, "nesterov": True},
        ),
        {"lr": 0.2, "momentum": 0.8, "dampening": 0.5},
    ),
    "Adagrad": (({"weight_decay": 0.0}, {"weight_decay": 0.1}), {"lr": 0.3}),
}
"""What differs between groups, and in the one that is added.

Of SGD each parameter has a group to itself: torch's fused step raises TypeError where some
parameters of a group have a momentum buffer and others start.
"""


class RandomUse(Beside):
    """Every action is done to both sides; the last parameter is in no group at first."""

    def __init__(self, kind: str, home: Any, seed: int) -> None:
        self.random = random.Random(seed)
        groups, self.late = GROUPS[kind]
        split = self.random.randrange(1, len(SHAPES) - 1)

        def grouped(parameters: list[torch.Tensor]) -> list[dict[str, Any]]:
            given = parameters[:-1]
            parts = [[p] for p in given] if kind == "momentum" else [given[:split], given[split:]]
            return [{"params": part, **groups[i % len(groups)]} for i, part in enumerate(parts)]

        super().__init__(kind, home, tensors(SHAPES), grouped=grouped)

    def change_parameter(self) -> None:
        index, how = self.random.randrange(len(SHAPES)), self.random.randrange(3)
        for side in self:
            p = side.parameters[index]
            if how == 0:
                p.detach().clamp_(-0.5, 0.5)
            elif how == 1:
                p.data.mul_(0.9)
            else:
                p.data = p.data + 0.125

    def change_moment(self) -> None:
        index, which = self.random.randrange(len(SHAPES)), self.random.randrange(2)
        for side in self:
            moments = [key for key in side.state.get(side.parameters[index], {}) if key != "step"]
            if moments:
                side.state[side.parameters[index]][moments[which % len(moments)]].mul_(0.5)

    def change_rate(self) -> None:
        factor = self.random.choice([0.5, 0.9, 1.5])
        for side in self:
            for group in side.optimizer.param_groups:
                group["lr"] *= factor

    def add_group(self) -> None:
        late, self.late = self.late, {}
        for side in self if late else ():
            side.optimizer.add_param_group({"params": [side.parameters[-1]], **late})

    def read_state(self) -> None:
        for side in self:
            copy.deepcopy(side.optimizer.state_dict())

    def reload(self) -> None:
        for side in self:
            side.optimizer.load_state_dict(copy.deepcopy(side.optimizer.state_dict()))

    def exchange(self) -> None:
        """Each goes on from the other's checkpoint."""
        swap(self)

    def duplicate(self) -> None:
        """Go on with a copy; the original is dropped."""
        self.mine, self.torchs = (
            Side(*copy.deepcopy((side.parameters, side.optimizer))) for side in self
        )

    def reset_state(self) -> None:
        index = self.random.randrange(len(SHAPES))
        for side in self:
            side.state.pop(side.parameters[index], None)


ACTIONS = [name for name, each in vars(RandomUse).items() if callable(each) and name[0] != "_"]


@like_torch
@pytest.mark.parametrize("home", list(HOMES), indirect=True)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", ["AdamW", "momentum", pytest.param("Adagrad", marks=late_adagrad)])
def test_random_use_equals_torch(kind: str, seed: int, home: Any) -> None:
    use = RandomUse(kind, home, seed)
    compared, done = 0, []
    for _ in range(25):
        use.step(1, use.random.sample(range(len(SHAPES)), use.random.choice([0, 0, 1, 2])))
        if use.random.random() < 0.6:
            done.append(use.random.choice(ACTIONS))
            getattr(use, done[-1])()
        if use.random.random() < 0.5:
            compared += use.check()
    compared += use.check()
    print(f"seed {seed}: {compared} values compared; {', '.join(done)}")
    assert len(ACTIONS) == 9
    assert compared > 0
