"""Random sequences of everything that training code does, against torch's fused AdamW."""

from __future__ import annotations

import copy
import random

import pytest
import torch

import nearstep

SHAPES = [(16,), (8, 16), (2, 3, 16), (32, 48), (64,)]


class Pair:
    """The same training with nearstep and with torch; every action is done to both."""

    def __init__(self, device, seed):
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        start = [torch.randn(shape, generator=self.generator) for shape in SHAPES]
        self.lists = [[p.clone().requires_grad_() for p in start] for _ in range(2)]
        split = self.random.randrange(1, len(SHAPES) - 1)
        self.optimizers = [
            factory(
                [{"params": ps[:split], "lr": 1e-2}, {"params": ps[split:-1], "weight_decay": 0.3}]
            )
            for factory, ps in zip(
                (
                    lambda groups: nearstep.optim.AdamW(groups, device=device),
                    lambda groups: torch.optim.AdamW(groups, fused=True),
                ),
                self.lists,
                strict=True,
            )
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
        key = self.random.choice(["exp_avg", "exp_avg_sq"])
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
                optimizer.add_param_group({"params": [parameters[-1]], "betas": (0.8, 0.99)})
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
                assert mine["step"] == other["step"]
                for key in ("exp_avg", "exp_avg_sq"):
                    assert torch.equal(mine[key].view(torch.int32), other[key].view(torch.int32))
                    compared += a.numel()
        return compared


@pytest.mark.parametrize("seed", range(6))
def test_random_use_equals_torch(seed, device):
    pair = Pair(device, seed)
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
