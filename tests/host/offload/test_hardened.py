"""What training loops do besides training, and what must not go unseen."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import nearstep
from nearstep.errors import ArgumentError
from nearstep.torch.errors import EarlyUpdateError, InterruptedStepError, ParameterError
from nearstep.torch.offload.errors import BudgetError

from .models import WIDTH
from .training import GOLDEN, Made, alike, assert_like_plain, bits, loss_of, stack, steps

LAYER = 4 * (WIDTH * WIDTH + WIDTH)
LAYERS = 6
URL = "golden:axdimm?memory_bytes=2MiB"


class Residual(nn.Module):
    """Layers whose weights backward wants again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def with_adamw(make: Callable[[], nn.Module]) -> Made:
    torch.manual_seed(13)
    model = make()
    return model, nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=URL)


def made() -> Made:
    return with_adamw(Residual)


@pytest.mark.parametrize("budget", ["40%", "60%", "100%", "300%"])
def test_evaluation_in_inference_mode_leaves_nothing_of_that(budget: str) -> None:
    found = []
    for offloaded in (False, True):
        model, optimizer = made()
        with torch.inference_mode():
            engine = nearstep.offload(model, optimizer, budget=budget) if offloaded else None
        losses = []
        for seed in range(3):
            loss_of(model, seed).backward()
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
    def use(model, optimizer, engine):
        for number in range(6):
            if resets == "to zero":
                optimizer.zero_grad(set_to_none=False)
            elif resets == "sometimes" and number == 3:
                optimizer.zero_grad()
            x = torch.full((2, WIDTH), number + 1.0)
            for index, layer in enumerate(model):
                if (index + number) % 3:  # not all are used in every step
                    x = x + torch.tanh(layer(x))
            x.square().mean().backward()
            optimizer.step()
        model.zero_grad()

    def layers() -> nn.Module:
        return nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=bias) for _ in range(LAYERS))

    alike(use, lambda: with_adamw(layers), budget=budget, updates="in-backward")


def goes_on_after(fail: str) -> Made:
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
    steps(model, optimizer)
    assert_like_plain(model, optimizer, made)


@pytest.mark.parametrize("budget", ["60%", "100%", "200%", "300%"])
@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
def test_a_graph_from_before_close(budget: str, updates: str) -> None:
    def use(model, optimizer, engine):
        steps(model, optimizer)
        optimizer.zero_grad()
        loss = loss_of(model)
        if engine is not None:
            engine.close()
        loss.backward()
        gradients = bits([p.grad for p in model.parameters()])
        optimizer.step()
        steps(model, optimizer)
        assert not any(p.isnan().any() for p in model.parameters())
        return gradients

    alike(use, made, budget=budget, updates=updates)


def test_close_between_backward_with_updates_and_step() -> None:
    model, optimizer = made()
    with nearstep.offload(model, optimizer, budget="60%", updates="in-backward"):
        loss_of(model).backward()
    with pytest.raises(InterruptedStepError):
        optimizer.step()


@pytest.mark.parametrize("budget", ["60%", "300%"])
def test_other_memory_between_forward_and_backward_is_refused(budget: str) -> None:
    def use(model, optimizer, engine):
        loss = loss_of(model)
        model.layers[2].weight.data = torch.zeros(WIDTH, WIDTH)
        if engine is not None:
            with pytest.raises(ParameterError, match=r"layers\.2\.weight must be in the memory"):
                loss.backward()
        optimizer.zero_grad()
        return steps(model, optimizer)

    alike(use, made, budget=budget)


def test_set_is_refused_and_changes_nothing() -> None:
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget="60%")
    with torch.no_grad(), pytest.raises(ParameterError, match=r"layers\.1\.weight .* p\.data = "):
        model.layers[1].weight.set_(torch.ones(WIDTH, WIDTH))
    steps(model, optimizer)
    assert_like_plain(model, optimizer, made)


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
    steps(model, optimizer)
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


def flattened(module: nn.LSTM) -> nn.LSTM:
    """Its weights in one memory, as cuDNN wants them."""
    weights = list(module.parameters())
    flat = torch.cat([each.detach().reshape(-1) for each in weights])
    for each, part in zip(weights, flat.split([each.numel() for each in weights]), strict=True):
        each.data = part.view_as(each)
    return module


@pytest.mark.parametrize("policy", ["prefetch", "on-demand", "memferry"])
def test_weights_of_recurrent_modules_may_be_in_one_memory(policy: Any) -> None:
    x = torch.randn(3, 5, WIDTH, generator=torch.Generator().manual_seed(4))

    def trained(flat: bool) -> list[Any]:
        torch.manual_seed(5)
        model = nn.LSTM(WIDTH, WIDTH, num_layers=2)
        model = flattened(model) if flat else model
        optimizer = nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=GOLDEN)
        if flat:
            engine = nearstep.offload(model, optimizer, budget="200%", policy=policy)
        for _ in range(3):
            optimizer.zero_grad()
            model(x)[0].square().mean().backward()
            optimizer.step()
        if flat:
            assert engine.report().peak <= engine.budget
            engine.close()
        return bits(model.state_dict())

    assert trained(True) == trained(False)


def test_one_memory_of_a_recurrent_module_and_another_is_refused() -> None:
    model = nn.Sequential(flattened(nn.LSTM(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    model[1].bias.data = model[0].bias_hh_l0.data[:WIDTH]
    optimizer = nearstep.optim.AdamW(model.parameters(), device=GOLDEN)
    with pytest.raises(ParameterError, match=r"1\.bias must be in memory of its own"):
        nearstep.offload(model, optimizer, budget="400%")
    model = flattened(nn.LSTM(WIDTH, WIDTH))
    model.bias_hh_l0.data = model.bias_ih_l0.data
    optimizer = nearstep.optim.AdamW(model.parameters(), device=GOLDEN)
    with pytest.raises(ParameterError, match=r"bias_hh_l0 must be in memory of its own"):
        nearstep.offload(model, optimizer, budget="400%")
    assert {type(each) for each in model.parameters()} == {nn.Parameter}


@pytest.mark.parametrize("model", [None, [nn.Linear(2, 2)]])
def test_what_is_no_model(model: object) -> None:
    with pytest.raises(ArgumentError, match=r"model must be a torch\.nn\.Module, not"):
        nearstep.offload(model, stack()[1], budget="100%")  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:.*nested tensor")
def test_attention_in_evaluation_needs_torchs_fast_path_off() -> None:
    mask = torch.tensor([[False] * 3, [False, True, True]])
    x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(4))

    def attention() -> nn.Module:
        layer = nn.TransformerEncoderLayer(WIDTH, 2, WIDTH, batch_first=True)
        return nn.TransformerEncoder(layer, 2)

    def use(model, optimizer, engine):
        model.eval()
        if engine is not None:
            with torch.no_grad(), pytest.raises(ParameterError, match="set_fastpath_enabled"):
                model(x, src_key_padding_mask=mask)
        torch.backends.mha.set_fastpath_enabled(False)
        try:
            with torch.no_grad():
                return model(x, src_key_padding_mask=mask)
        finally:
            torch.backends.mha.set_fastpath_enabled(True)

    alike(use, lambda: with_adamw(attention), budget="200%")
