"""State of an offloaded model: checkpoints, copies, changes by hand, and closing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import nn

import nearstep

from .models import Frozen, Tied
from .training import bits

WIDTH = 16
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
URL = "golden:axdimm?memory_bytes=2MiB&gradient_formats=fp32,bf16&copy_out_formats=bf16"

Model = nn.Sequential
Optimizer = nearstep.optim.AdamW


def made(dtype: torch.dtype = torch.float32) -> tuple[Model, Optimizer]:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))).to(dtype)
    return model, nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=URL)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 2, seed: int = 0) -> list[float]:
    generator = torch.Generator().manual_seed(seed)
    dtype = next(model.parameters()).dtype
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(4, WIDTH, generator=generator).to(dtype)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def words(model: nn.Module) -> object:
    """Bits of the state of a model, of 16 bits, too."""
    return {k: bits(v.float()) for k, v in model.state_dict().items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpoints_are_those_of_the_plain_model(dtype: torch.dtype) -> None:
    plain, plain_optimizer = made(dtype)
    model, optimizer = made(dtype)
    engine = nearstep.offload(model, optimizer, budget=LAYER * 2)
    assert train(model, optimizer) == train(plain, plain_optimizer)
    saved = copy.deepcopy((plain.state_dict(), plain_optimizer.state_dict()))
    own = model.state_dict(), optimizer.state_dict()
    assert all(type(each) is torch.Tensor for each in own[0].values())
    assert words(model) == words(plain)
    assert bits(own[1]["state"]) == bits(saved[1]["state"])
    after = train(plain, plain_optimizer, seed=1), words(plain)
    for state in (saved, own):
        train(model, optimizer, steps=1, seed=8)
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        assert (train(model, optimizer, seed=1), words(model)) == after
        assert bits(optimizer.state_dict()["state"]) == bits(plain_optimizer.state_dict()["state"])
    assert engine.report().peak <= engine.budget


def test_a_checkpoint_does_not_change_afterwards() -> None:
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget=LAYER * 2)
    saved = model.state_dict()
    before = bits(saved)
    train(model, optimizer)
    assert bits(saved) == before
    assert bits(model.state_dict()) != before
    kept = model.state_dict(keep_vars=True)
    assert kept["0.weight"] is model[0].weight


def through_pickle(model: nn.Module) -> nn.Module:
    found = pickle.loads(pickle.dumps(model))
    assert isinstance(found, nn.Module)
    return found


def through_a_file(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    found = torch.load(file, weights_only=False)
    assert isinstance(found, nn.Module)
    return found


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle, through_a_file])
def test_copies_are_plain_models(copied: Callable[[nn.Module], nn.Module]) -> None:
    model, optimizer = made()
    engine = nearstep.offload(model, optimizer, budget=LAYER * 2)
    train(model, optimizer)
    found = copied(model)
    assert {type(each) for each in found.parameters()} == {nn.Parameter}
    assert bits(found.state_dict()) == bits(model.state_dict())
    found(torch.ones(1, WIDTH)).sum().backward()
    assert engine.report().peak <= engine.budget


def test_a_copy_of_the_optimizer_is_plain() -> None:
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget=LAYER * 2)
    train(model, optimizer)
    found = pickle.loads(pickle.dumps(optimizer))
    assert bits(found.state_dict()) == bits(optimizer.state_dict())
    assert {type(each) for each in found.param_groups[0]["params"]} == {nn.Parameter}
    for each in found.param_groups[0]["params"]:
        each.grad = torch.ones_like(each)
    found.step()


@pytest.mark.parametrize("kind", [Tied, Frozen])
def test_closed_and_opened_again(kind: type[nn.Module]) -> None:
    def use(*, offloaded: bool) -> object:
        torch.manual_seed(4)
        model = kind()
        optimizer = nearstep.optim.AdamW(model.parameters(), device=URL)
        losses = []
        for seed in range(4):
            if offloaded and seed % 2:
                with nearstep.offload(model, optimizer, budget="300%") as engine:
                    losses += train(model, optimizer, seed=seed)
                engine.close()
                assert engine.closed
                assert {type(each) for each in model.parameters()} == {nn.Parameter}
                assert not model._forward_pre_hooks
            else:
                losses += train(model, optimizer, seed=seed)
        return losses, bits(model.state_dict()), bits(optimizer.state_dict())

    assert use(offloaded=True) == use(offloaded=False)


def test_changes_by_hand_reach_the_owner() -> None:
    def use(*, offloaded: bool) -> object:
        model, optimizer = made()
        if offloaded:
            nearstep.offload(model, optimizer, budget=LAYER * 2)
        weight = model[2].weight
        train(model, optimizer)
        with torch.no_grad():
            weight.mul_(0.5)
            model[1].bias.copy_(torch.linspace(0, 1, WIDTH))
            torch.nn.init.constant_(model[0].bias, 0.25)
        train(model, optimizer)
        weight.data.add_(1.0)
        model[3].weight.detach().numpy()[2] = 0.5
        losses = train(model, optimizer)
        model[0].weight.data = torch.eye(WIDTH)
        losses += train(model, optimizer)
        return losses, bits(model.state_dict()), bits(optimizer.state_dict())

    assert use(offloaded=True) == use(offloaded=False)


def test_layers_frozen_and_thawed() -> None:
    def use(*, offloaded: bool) -> object:
        torch.manual_seed(6)
        model = Frozen()
        optimizer = nearstep.optim.AdamW(model.parameters(), device=URL)
        if offloaded:
            nearstep.offload(model, optimizer, budget=LAYER * 3)
        losses = train(model, optimizer)
        model.frozen.requires_grad_(True)
        model.first.weight.requires_grad = False
        losses += train(model, optimizer)
        model.first.requires_grad_(True)
        losses += train(model, optimizer)
        return losses, bits(model.state_dict()), bits(optimizer.state_dict())

    assert use(offloaded=True) == use(offloaded=False)


def test_what_does_not_need_elements_fetches_nothing() -> None:
    model, optimizer = made()
    engine = nearstep.offload(model, optimizer, budget=LAYER * 2)
    weight = model[0].weight
    assert isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.stride(), weight.numel()) == ((16, 16), (16, 1), 256)
    assert weight.is_contiguous()
    assert weight.grad is None
    assert weight.is_leaf
    assert len({weight: 1, model[1].weight: 2}) == 2
    assert sum(p.numel() * p.element_size() for p in model.parameters()) == 4 * LAYER
    assert engine.report().fetches == 0
    assert "Parameter containing" in repr(weight)
    assert engine.report().fetches > 0


def test_evaluation_in_every_mode() -> None:
    model, optimizer = made()
    expected = model(torch.ones(1, WIDTH)).detach()
    engine = nearstep.offload(model, optimizer, budget=LAYER * 2)
    x = torch.ones(1, WIDTH)
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    with torch.inference_mode():
        assert torch.equal(model(x), expected)
    assert torch.equal(torch.func.vmap(model)(x), expected)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        assert torch.equal(compiled(x), expected)
    train(model, optimizer)
    assert engine.report().peak <= engine.budget
