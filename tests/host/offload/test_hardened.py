"""What training loops do besides training, and what must not go unseen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import nearstep

from .training import bits

WIDTH = 16
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
LAYERS = 6
URL = "golden:axdimm?memory_bytes=2MiB"

Optimizer = nearstep.optim.AdamW


class Residual(nn.Module):
    """Layers whose weights backward wants again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def made() -> tuple[Residual, Optimizer]:
    torch.manual_seed(13)
    model = Residual()
    return model, nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=URL)


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def train(model: nn.Module, optimizer: Optimizer, steps: int = 2) -> None:
    for seed in range(steps):
        optimizer.zero_grad()
        loss_of(model, seed).backward()
        optimizer.step()


@pytest.mark.parametrize("budget", ["40%", "60%", "100%", "300%"])
def test_evaluation_in_inference_mode_leaves_nothing_of_that(budget: str) -> None:
    found = []
    for offloaded in (False, True):
        model, optimizer = made()
        with torch.inference_mode():
            engine = nearstep.offload(model, optimizer, budget=budget) if offloaded else None
        losses = []
        for seed in range(3):
            loss = loss_of(model, seed)
            loss.backward()
            with torch.inference_mode():
                losses.append(loss_of(model).item())
                assert model.layers[0].weight.grad is not None
            loss_of(model, seed + 1).backward()
            optimizer.step()
            with torch.inference_mode():
                losses.append(loss_of(model).item())
            optimizer.zero_grad()
        loss_of(model).backward()
        if engine is not None:
            with torch.inference_mode():
                engine.close()
        here = [t for p in model.parameters() for t in (p, p.grad) if t is not None]
        assert len(here) == 4 * LAYERS
        assert not any(each.is_inference() for each in here)
        loss_of(model).backward()
        found.append((losses, bits(model.state_dict()), bits([p.grad for p in model.parameters()])))
    assert found[0] == found[1]
