"""Gradients of an offloaded model, as the user sees them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import nearstep
from nearstep.torch.errors import InterruptedStepError, UnsupportedOptionError
from nearstep.torch.offload.errors import BudgetError, EarlyUpdateError

from .training import bits

WIDTH = 16
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
LAYERS = 4
URL = (
    "golden:axdimm?memory_bytes=2MiB&gradient_scale=yes&scan=yes"
    "&gradient_formats=fp32,bf16&copy_out_formats=bf16"
)

Offloaded = tuple[nn.Sequential, nearstep.optim.AdamW]


def made(**options: float) -> Offloaded:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    return model, nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=URL, **options)


def both(use: Callable[[nn.Sequential, nearstep.optim.AdamW], object], **offload: object) -> None:
    """Have a plain and an offloaded model used in one way, and compare all."""
    options = offload.pop("options", {})
    plain, plain_optimizer = made(**options)  # type: ignore[arg-type]
    expected = use(plain, plain_optimizer)
    model, optimizer = made(**options)  # type: ignore[arg-type]
    with nearstep.offload(model, optimizer, **offload) as engine:  # type: ignore[arg-type]
        assert bits(use(model, optimizer)) == bits(expected)
        assert bits(model.state_dict()) == bits(plain.state_dict())
        assert bits(optimizer.state_dict()) == bits(plain_optimizer.state_dict())
        assert engine.report().peak <= engine.budget
    assert bits([p.grad for p in model.parameters()]) == bits([p.grad for p in plain.parameters()])


def loss_of(model: nn.Module, seed: int = 0) -> Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
    return model(x).square().mean()


def test_a_norm_bounded_on_the_host() -> None:
    def use(model: nn.Sequential, optimizer: nearstep.optim.AdamW) -> object:
        norms = []
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
        return norms

    both(use, budget=2 * LAYERS * LAYER)
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget=2 * LAYER)
    with pytest.raises(BudgetError, match="max_grad_norm"):
        use(model, optimizer)


def test_a_norm_bounded_on_the_device() -> None:
    def use(model: nn.Sequential, optimizer: nearstep.optim.AdamW) -> None:
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            optimizer.step()

    both(use, budget=2 * LAYER, options={"max_grad_norm": 0.01})


@pytest.mark.parametrize("resets", [True, False])
def test_a_scaler_that_leaves_all_to_the_device(resets: bool) -> None:
    def use(model: nn.Sequential, optimizer: nearstep.optim.AdamW) -> object:
        scaler = nearstep.optim.GradScaler("cpu", init_scale=1e38, growth_interval=2)
        for seed in range(4):
            if resets:
                optimizer.zero_grad()
            scaler.scale(loss_of(model, seed) * 100).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    both(use, budget=2 * LAYER)


def test_gradients_that_are_read_one_after_the_other() -> None:
    def use(model: nn.Sequential, optimizer: nearstep.optim.AdamW) -> object:
        loss_of(model).backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        assert len(norms) == 2 * LAYERS
        optimizer.step()
        return norms

    both(use, budget=2 * LAYER)


def test_gradients_that_are_changed_and_assigned_and_reset_to_zero() -> None:
    def use(model: nn.Sequential, optimizer: nearstep.optim.AdamW) -> None:
        first, *_, last = model.parameters()
        for seed in range(3):
            loss_of(model, seed).backward()
            assert first.grad is not None
            first.grad.mul_(0.5)
            last.grad = torch.full_like(last, 0.25)
            optimizer.step()
            if seed:
                model.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=False)
        del first.grad
        assert first.grad is None

    both(use, budget=2 * LAYER)


def test_gradients_for_a_caller_and_of_gradients() -> None:
    def use(model: nn.Sequential, optimizer: nearstep.optim.AdamW) -> object:
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss_of(model), parameters)
        graph = torch.autograd.grad(loss_of(model), parameters, create_graph=True)
        sum(each.square().sum() for each in graph).backward()
        optimizer.step()
        return first

    both(use, budget=3 * LAYERS * LAYER)


def test_hooks_of_the_user_see_gradients() -> None:
    def use(model: nn.Sequential, optimizer: nearstep.optim.AdamW) -> object:
        seen = []
        weight = model[1].weight
        weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for seed in range(2):
            loss_of(model, seed).backward()
            optimizer.step()
        return seen

    both(use, budget=2 * LAYER)


def test_a_closure() -> None:
    def use(model: nn.Sequential, optimizer: nearstep.optim.AdamW) -> object:
        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss.item()

        return [optimizer.step(closure) for _ in range(3)]

    both(use, budget=2 * LAYER)
    both(use, budget=2 * LAYER, updates="in-backward")


def early() -> tuple[nn.Sequential, nearstep.optim.AdamW]:
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget=4 * LAYER, updates="in-backward")
    loss_of(model).backward()
    return model, optimizer


def changes_rate(model: nn.Sequential, optimizer: nearstep.optim.AdamW) -> None:
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def scales(model: nn.Sequential, optimizer: nearstep.optim.AdamW) -> None:
    scaler = nearstep.optim.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


EARLY: dict[str, Callable[[nn.Sequential, nearstep.optim.AdamW], object]] = {
    "rate": changes_rate,
    "scaler": scales,
    "clip": lambda m, _: torch.nn.utils.clip_grad_norm_(m.parameters(), 1.0),
    "second backward": lambda m, _: loss_of(m).backward(),
    "evaluation": lambda m, _: loss_of(m),
    "zero_grad": lambda m, o: o.zero_grad(),
    "assigned": lambda m, _: setattr(m[0].weight, "grad", None),
}


@pytest.mark.parametrize("what", EARLY)
def test_what_early_updates_cannot_be_right_with_is_refused(what: str) -> None:
    model, optimizer = early()
    saved = made()
    with pytest.raises(EarlyUpdateError, match="at-step"):
        EARLY[what](model, optimizer)
    with pytest.raises(InterruptedStepError):
        optimizer.step()
    model.load_state_dict(saved[0].state_dict())
    optimizer.load_state_dict(saved[1].state_dict())
    for each, own in ((model, optimizer), saved):
        own.zero_grad()
        loss_of(each).backward()
        own.step()
    assert bits(model.state_dict()) == bits(saved[0].state_dict())


def test_early_updates_do_not_clip() -> None:
    model, optimizer = made(max_grad_norm=1.0)
    with pytest.raises(UnsupportedOptionError, match="max_grad_norm"):
        nearstep.offload(model, optimizer, budget="100%", updates="in-backward")
    assert type(model[0].weight) is nn.Parameter
