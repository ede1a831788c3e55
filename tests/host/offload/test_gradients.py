"""Gradients of an offloaded model, as the user sees them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import nearstep
from nearstep.torch.errors import EarlyUpdateError, InterruptedStepError, UnsupportedOptionError
from nearstep.torch.offload.errors import BudgetError

from .models import WIDTH
from .training import CPU, Made, alike, bits, loss_of, stack, step, steps

LAYER = 4 * (WIDTH * WIDTH + WIDTH)
LAYERS = 4
URL = (
    "golden:axdimm?memory_bytes=2MiB&gradient_scale=yes&scan=yes"
    "&gradient_formats=fp32,fp16,bf16&copy_out_formats=fp16,bf16"
)
on_cpu = partial(stack, device=URL, on=CPU)
made = partial(on_cpu, LAYERS)
two_layers = partial(alike, make=made, budget=2 * LAYER)


def test_a_norm_bounded_on_the_host() -> None:
    def use(model, optimizer, _):
        norms = []
        for seed in range(3):
            optimizer.zero_grad()
            loss_of(model, seed).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01))
            optimizer.step()
        return norms

    alike(use, made, budget=2 * LAYERS * LAYER)
    model, optimizer = made()
    engine = nearstep.offload(model, optimizer, budget=2 * LAYER)
    with pytest.raises(BudgetError, match="max_grad_norm"):
        use(model, optimizer, engine)


def test_a_norm_bounded_on_the_device() -> None:
    make = partial(made, max_grad_norm=0.01)
    alike(lambda model, optimizer, _: steps(model, optimizer, 3), make, budget=2 * LAYER)


@pytest.mark.parametrize("resets", [True, False])
def test_a_scaler_that_leaves_all_to_the_device(resets: bool) -> None:
    def use(model, optimizer, _):
        scaler = nearstep.optim.GradScaler("cpu", init_scale=1e38, growth_interval=2)
        for seed in range(4):
            if resets:
                optimizer.zero_grad()
            scaler.scale(loss_of(model, seed) * 100).backward()
            scaler.step(optimizer)
            scaler.update()
        return scaler.get_scale()

    two_layers(use)


def test_gradients_that_are_read_one_after_the_other() -> None:
    def use(model, optimizer, _):
        loss_of(model).backward()
        norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
        assert len(norms) == 2 * LAYERS
        optimizer.step()
        return norms

    two_layers(use)


def test_gradients_that_are_changed_and_assigned_and_reset_to_zero() -> None:
    def use(model, optimizer, _):
        first, *_, last = model.parameters()
        for seed in range(3):
            loss_of(model, seed).backward()
            first.grad.mul_(0.5)
            last.grad = torch.full_like(last, 0.25)
            optimizer.step()
            if seed:
                model.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=False)
        del first.grad
        assert first.grad is None

    two_layers(use)


def test_gradients_for_a_caller_and_of_gradients() -> None:
    def use(model, optimizer, engine):
        parameters = list(model.parameters())
        first = torch.autograd.grad(loss_of(model), parameters)
        assert engine is None or engine.report().peak_gradients == 0  # they are the caller's
        graph = torch.autograd.grad(loss_of(model), parameters, create_graph=True)
        sum(each.square().sum() for each in graph).backward()
        optimizer.step()
        return first

    alike(use, made, budget=3 * LAYERS * LAYER)
    two_layers(lambda model, *_: torch.autograd.grad(loss_of(model), list(model.parameters())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_large_gradients_are_added_up_in_their_own_format(dtype: torch.dtype) -> None:
    def use(model, optimizer, _):
        for seed in range(4):
            loss_of(model, seed).backward()
            if seed % 2:
                optimizer.step()
        assert all(p.grad is not None for p in model.parameters())

    wide = 160  # more elements than are added up at once
    alike(use, partial(on_cpu, 1, wide, dtype=dtype), budget="200%")


def test_hooks_of_the_user_see_gradients() -> None:
    def use(model, optimizer, _):
        seen = []
        weight = model[1].weight
        weight.register_hook(lambda gradient: seen.append(gradient.clone()) or gradient * 2)
        weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for seed in range(2):
            loss_of(model, seed).backward()
            optimizer.step()
        assert len(seen) == 4
        return seen

    two_layers(use)


ADDED: dict[str, Callable[[nn.Module], object]] = {
    "of a graph": lambda model: loss_of(model).backward(create_graph=True),
    "sparse": lambda model: (
        functional.embedding(torch.tensor([1, 2, 2]), model[0].weight, sparse=True)
        .square()
        .sum()
        .backward()
    ),
    "read in a hook": lambda model: loss_of(model).backward(),
}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("then", ["step", "close"])
@pytest.mark.parametrize("kind", ADDED)
def test_a_gradient_is_added_to_the_one_sent_before(kind: str, then: str) -> None:
    def make() -> Made:
        model, optimizer = made()
        model.seen = []
        if kind == "read in a hook":  # before the engine's hook
            see = model.seen
            model[0].weight.register_post_accumulate_grad_hook(lambda p: see.append(p.grad.clone()))
        return model, optimizer

    def use(model, optimizer, _):
        loss_of(model).backward()
        ADDED[kind](model)
        assert len(model.seen) == (2 if kind == "read in a hook" else 0)
        if then == "step":
            optimizer.step()
        return model.seen

    alike(use, make, budget=3 * LAYERS * LAYER)


def test_a_gradient_that_stays_is_added_to_the_one_that_was_sent_for_room() -> None:
    def use(model, optimizer, engine):
        loss_of(model).backward()
        if engine is not None:
            engine._gradients.stay = True  # as of updates in backward with drives
        loss_of(model, 1).backward()
        assert engine is None or engine.report().gradients == 4 * LAYERS
        optimizer.step()

    alike(use, made, budget=3 * LAYERS * LAYER)


def test_unused_gradients_are_zeros_on_request() -> None:
    def use(model, *_):
        model[3].weight.data = torch.ones(2 * WIDTH, WIDTH)[::2]
        parameters = list(model.parameters())
        found = torch.autograd.grad(loss_of(model[:3]), parameters, materialize_grads=True)
        assert len(found) == 2 * LAYERS
        assert not any(each.any() for each in found[6:])
        named = dict(model.named_parameters())
        first = torch.autograd.grad(
            loss_of(model[:1]), named, create_graph=True, materialize_grads=True
        )
        assert all(each.requires_grad for each in list(first.values())[2:])
        with pytest.raises(RuntimeError, match="not have been used"):
            torch.autograd.grad(loss_of(model[:1]), parameters)
        return found, [each.stride() for each in found], first

    alike(use, made, budget=3 * LAYERS * LAYER)


@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
def test_a_closure(updates: str) -> None:
    def use(model, optimizer, _):
        def closure() -> float:
            optimizer.zero_grad()
            loss = loss_of(model)
            loss.backward()
            return loss.item()

        return [optimizer.step(closure) for _ in range(3)]

    two_layers(use, updates=updates)


def changes_rate(model: nn.Module, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] = 0.5
    optimizer.step()


def scales(model: nn.Module, optimizer: Any) -> None:
    scaler = nearstep.optim.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)


EARLY: dict[str, Callable[..., object]] = {
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
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget=4 * LAYER, updates="in-backward")
    loss_of(model).backward()
    saved: Made = made()
    with pytest.raises(EarlyUpdateError, match="at-step"):
        EARLY[what](model, optimizer)
    with pytest.raises(InterruptedStepError):
        optimizer.step()
    model.load_state_dict(saved[0].state_dict())
    optimizer.load_state_dict(saved[1].state_dict())
    for each in ((model, optimizer), saved):
        step(*each)
    assert bits(model.state_dict()) == bits(saved[0].state_dict())


def test_no_checkpoint_is_made_between_early_updates_and_the_step() -> None:
    model, optimizer = made()
    engine = nearstep.offload(model, optimizer, budget=4 * LAYER, updates="in-backward")
    plain, plain_optimizer = made()
    for each in (model, plain):
        loss_of(each).backward()
    with pytest.raises(EarlyUpdateError, match=r"state_dict\(\) is called before step\(\)"):
        optimizer.state_dict()
    optimizer.step()
    plain_optimizer.step()
    found, wanted = optimizer.state_dict(), plain_optimizer.state_dict()
    assert bits(found["state"]) == bits(wanted["state"])
    assert bits(model.state_dict()) == bits(plain.state_dict())
    engine.close()
    loss_of(model).backward()
    optimizer.state_dict()


def test_early_updates_do_not_clip() -> None:
    model, optimizer = made(max_grad_norm=1.0)
    with pytest.raises(UnsupportedOptionError, match="max_grad_norm"):
        nearstep.offload(model, optimizer, budget="100%", updates="in-backward")
    assert type(model[0].weight) is nn.Parameter
