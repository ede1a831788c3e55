"""State of an offloaded model: checkpoints, copies, changes by hand, and closing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import nearstep

from .models import Frozen, Tied
from .training import Made, alike, bits, stack, steps

WIDTH = 16
LAYER = 4 * (WIDTH * WIDTH + WIDTH)
URL = "golden:axdimm?memory_bytes=2MiB&gradient_formats=fp32,bf16&copy_out_formats=bf16"
made = partial(stack, device=URL)


def of_kind(kind: type[nn.Module]) -> Made:
    torch.manual_seed(4)
    model = kind()
    return model, nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=URL)


def train(model: nn.Module, optimizer: nearstep.optim.AdamW, seed: int = 0) -> list[float]:
    return steps(model, optimizer, seed=16 * seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_checkpoints_are_those_of_the_plain_model(dtype: torch.dtype) -> None:
    plain, plain_optimizer = made(dtype=dtype)
    model, optimizer = made(dtype=dtype)
    engine = nearstep.offload(model, optimizer, budget=LAYER * 2)
    assert train(model, optimizer) == train(plain, plain_optimizer)
    saved = copy.deepcopy((plain.state_dict(), plain_optimizer.state_dict()))
    own = model.state_dict(), optimizer.state_dict()
    assert all(type(each) is torch.Tensor for each in own[0].values())
    assert bits(own) == bits(saved)
    after = train(plain, plain_optimizer, seed=1), bits(plain.state_dict())
    for state in (saved, own):
        steps(model, optimizer, 1, seed=8)
        model.load_state_dict(state[0])
        optimizer.load_state_dict(state[1])
        assert (train(model, optimizer, seed=1), bits(model.state_dict())) == after
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


class Root(nn.Module):
    """A model with parameters of its own, which raises when they are saved."""

    fails = True

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)

    def _save_to_state_dict(self, *args: Any) -> None:
        if self.fails:
            raise OSError("in the user's program")
        super()._save_to_state_dict(*args)

    def forward(self, x):
        return self.layer(x * self.scale)


def test_a_checkpoint_that_raises_loses_no_write() -> None:
    def use(model, optimizer, _):
        with pytest.raises(OSError, match="user's program"):
            model.state_dict()
        model.scale.detach().mul_(5)
        losses = train(model, optimizer)
        model.fails = False
        return losses

    alike(use, lambda: of_kind(Root), budget="300%")


def through_pickle(value):
    return pickle.loads(pickle.dumps(value))


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
    model[0].weight.tag = "no decay"
    found = copied(model)
    assert hasattr(found[0].weight, "tag") == (copied is not copy.deepcopy)  # as of torch
    assert not {"_copy", "_kept", "_waiting"} & vars(found[0].weight).keys()
    assert {type(each) for each in found.parameters()} == {nn.Parameter}
    assert bits(found.state_dict()) == bits(model.state_dict())
    found(torch.ones(1, WIDTH)).sum().backward()
    assert engine.report().peak <= engine.budget


def test_a_copy_of_the_optimizer_is_plain() -> None:
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget=LAYER * 2)
    train(model, optimizer)
    found = through_pickle(optimizer)
    assert bits(found.state_dict()) == bits(optimizer.state_dict())
    assert {type(each) for each in found.param_groups[0]["params"]} == {nn.Parameter}
    for each in found.param_groups[0]["params"]:
        each.grad = torch.ones_like(each)
    found.step()


@pytest.mark.parametrize("kind", [Tied, Frozen])
def test_closed_and_opened_again(kind: type[nn.Module]) -> None:
    def use(model, optimizer, engine):
        losses = []
        for seed in range(4):
            losses += train(model, optimizer, seed)
            if engine is not None and seed % 2:
                engine = nearstep.offload(model, optimizer, budget="300%")
            elif engine is not None:
                engine.close()
                engine.close()
                assert engine.closed
                assert {type(each) for each in model.parameters()} == {nn.Parameter}
                assert not model._forward_pre_hooks
        if engine is not None:
            engine.close()
        return losses

    alike(use, lambda: of_kind(kind), budget="300%")


def test_changes_by_hand_reach_the_owner() -> None:
    def use(model, optimizer, _):
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
        return losses + train(model, optimizer)

    alike(use, made, budget=LAYER * 2)


def test_layers_frozen_and_thawed() -> None:
    def use(model, optimizer, _):
        losses = train(model, optimizer)
        model.frozen.requires_grad_(True)
        model.first.weight.requires_grad = False
        losses += train(model, optimizer)
        model.first.requires_grad_(True)
        return losses + train(model, optimizer)

    alike(use, lambda: of_kind(Frozen), budget=LAYER * 3)


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


def test_two_models_in_one_graph_and_in_one_operation() -> None:
    def use(first, optimizer, engine):
        second, its = made()
        other = None if engine is None else nearstep.offload(second, its, budget=3 * LAYER)
        losses = []
        for seed in range(3):
            x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed))
            both = (first[0].weight @ second[1].weight.t()) * first[2].bias
            loss = (second(first(x)) @ both).square().mean()
            for each in (optimizer, its):
                each.zero_grad()
            loss.backward()
            for each in (optimizer, its):
                each.step()
            losses.append(loss.item())
        assert other is None or other.report().peak <= other.budget
        return losses, second.state_dict()

    alike(use, made, budget=3 * LAYER)


def test_evaluation_in_every_mode() -> None:
    model, optimizer = made()
    expected = model(torch.ones(1, WIDTH)).detach()
    engine = nearstep.offload(model, optimizer, budget=LAYER * 2)
    x = torch.ones(1, WIDTH)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(model(x), expected)
    compiled = torch.compile(model, backend="eager")
    for call in (torch.func.vmap(model), compiled, compiled):
        assert torch.equal(call(x), expected)
    train(model, optimizer)
    assert engine.report().peak <= engine.budget
