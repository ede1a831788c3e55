"""What training loops do besides training, and what must not go unseen."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor, nn

import nearstep
from nearstep.errors import ArgumentError
from nearstep.torch.errors import InterruptedStepError, ParameterError
from nearstep.torch.offload.errors import BudgetError, EarlyUpdateError

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


@pytest.mark.parametrize("resets", ["never", "to zero", "sometimes"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("budget", ["100%", "300%"])
def test_early_updates_with_gradients_that_were_not_reset(
    budget: str, resets: str, bias: bool
) -> None:
    found = []
    for offloaded in (False, True):
        torch.manual_seed(5)
        model = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(LAYERS))
        optimizer = nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=URL)
        if offloaded:
            nearstep.offload(model, optimizer, budget=budget, updates="in-backward")
        for step in range(6):
            if resets == "to zero":
                optimizer.zero_grad(set_to_none=False)
            elif resets == "sometimes" and step == 3:
                optimizer.zero_grad()
            x = torch.full((2, WIDTH), step + 1.0)
            for index, layer in enumerate(model):
                if (index + step) % 3:  # not all are used in every step
                    x = x + torch.tanh(layer(x))
            x.square().mean().backward()
            optimizer.step()
        found.append((bits(model.state_dict()), bits(optimizer.state_dict())))
    assert found[0] == found[1]


def goes_on_after(fail: str) -> tuple[Residual, Optimizer]:
    """A model with updates in backward, and a backward that failed after some of them."""
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget="60%", updates="in-backward")
    if fail == "hook":
        handle = model.layers[0].weight.register_hook(lambda gradient: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            loss_of(model).backward()
        handle.remove()
    else:
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        with pytest.raises(EarlyUpdateError, match="at-step"):
            loss.backward()
    return model, optimizer


@pytest.mark.parametrize("fail", ["hook", "second backward"])
def test_early_updates_of_a_backward_that_failed_are_not_passed_over(fail: str) -> None:
    model, optimizer = goes_on_after(fail)
    for _ in range(2):
        with pytest.raises(InterruptedStepError):
            optimizer.step()
    model, optimizer = goes_on_after(fail)
    plain, plain_optimizer = made()
    model.load_state_dict(plain.state_dict())
    optimizer.load_state_dict(plain_optimizer.state_dict())
    train(model, optimizer)
    train(plain, plain_optimizer)
    assert bits(model.state_dict()) == bits(plain.state_dict())
    assert bits(optimizer.state_dict()) == bits(plain_optimizer.state_dict())


@pytest.mark.parametrize("budget", ["60%", "100%", "200%", "300%"])
@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
def test_a_graph_from_before_close(budget: str, updates: Literal["at-step", "in-backward"]) -> None:
    found = []
    for offloaded in (False, True):
        model, optimizer = made()
        engine = None
        if offloaded:
            engine = nearstep.offload(model, optimizer, budget=budget, updates=updates)
        train(model, optimizer)
        optimizer.zero_grad()
        loss = loss_of(model)
        if engine is not None:
            engine.close()
        loss.backward()
        gradients = [p.grad for p in model.parameters()]
        optimizer.step()
        train(model, optimizer)
        found.append((bits(gradients), bits(model.state_dict()), bits(optimizer.state_dict())))
        assert not any(p.isnan().any() for p in model.parameters())
    assert found[0] == found[1]


def test_close_between_backward_with_updates_and_step() -> None:
    model, optimizer = made()
    with nearstep.offload(model, optimizer, budget="60%", updates="in-backward"):
        loss_of(model).backward()
    with pytest.raises(InterruptedStepError):
        optimizer.step()


@pytest.mark.parametrize("budget", ["60%", "300%"])
def test_other_memory_between_forward_and_backward_is_refused(budget: str) -> None:
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget=budget)
    loss = loss_of(model)
    model.layers[2].weight.data = torch.zeros(WIDTH, WIDTH)
    with pytest.raises(ParameterError, match=r"layers\.2\.weight must be in the memory"):
        loss.backward()
    optimizer.zero_grad()
    train(model, optimizer)
    plain, plain_optimizer = made()
    plain.layers[2].weight.data = torch.zeros(WIDTH, WIDTH)
    train(plain, plain_optimizer)
    assert bits(model.state_dict()) == bits(plain.state_dict())


def test_set_is_refused_and_changes_nothing() -> None:
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget="60%")
    with torch.no_grad(), pytest.raises(ParameterError, match=r"layers\.1\.weight .* p\.data = "):
        model.layers[1].weight.set_(torch.ones(WIDTH, WIDTH))
    train(model, optimizer)
    plain, plain_optimizer = made()
    train(plain, plain_optimizer)
    assert bits(model.state_dict()) == bits(plain.state_dict())


def test_memory_that_is_held_at_offload_and_is_more_than_the_budget() -> None:
    model, optimizer = made()
    held = [each.detach() for each in model.parameters()]
    budget = 3 * LAYER
    with pytest.raises(BudgetError, match=r"refers to \(layers\.0\.bias, layers\.0\.w") as raised:
        nearstep.offload(model, optimizer, budget=budget)
    assert (raised.value.expected, raised.value.actual) == (LAYERS * LAYER, budget)
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    del held
    engine = nearstep.offload(model, optimizer, budget=budget)
    train(model, optimizer)
    assert engine.report().peak <= budget


def test_parameters_that_are_views_of_one_tensor() -> None:
    model, optimizer = made()
    flat = torch.cat([each.detach().reshape(-1) for each in model.parameters()])
    parts = flat.split([each.numel() for each in model.parameters()])
    for parameter, part in zip(model.parameters(), parts, strict=True):
        parameter.data = part.view_as(parameter)
    with pytest.raises(ParameterError, match=r"layers\.0\.bias must be in memory of its own"):
        nearstep.offload(model, optimizer, budget="400%")
    assert {type(each) for each in model.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("model", [None, [nn.Linear(2, 2)]])
def test_what_is_no_model(model: object) -> None:
    optimizer = made()[1]
    with pytest.raises(ArgumentError, match=r"model must be a torch\.nn\.Module, not"):
        nearstep.offload(model, optimizer, budget="100%")  # type: ignore[arg-type]


def attention() -> nn.Module:
    layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


@pytest.mark.filterwarnings("ignore:.*nested tensor")
def test_attention_in_evaluation_needs_torchs_fast_path_off() -> None:
    mask = torch.tensor([[False] * 3, [False, True, True]])
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(4))
    found = []
    for offloaded in (False, True):
        torch.manual_seed(3)
        model = attention()
        optimizer = nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=URL)
        if offloaded:
            nearstep.offload(model, optimizer, budget="200%")
            model.eval()
            with torch.no_grad(), pytest.raises(ParameterError, match="set_fastpath_enabled"):
                model(x, src_key_padding_mask=mask)
        model.eval()
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.no_grad():
                found.append(bits(model(x, src_key_padding_mask=mask)))
        finally:
            torch.backends.mha.set_fastpath_enabled(True)
    assert found[0] == found[1]
