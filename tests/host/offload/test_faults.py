"""What goes wrong, by name, and leaves a model and an engine that can be used."""

from __future__ import annotations

import copy
import gc
import pickle
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import nearstep
from nearstep.errors import ArgumentError, ClosedDeviceError
from nearstep.memferry.cost import Decision, Mode
from nearstep.memferry.plan import Plan
from nearstep.torch.errors import InterruptedStepError, ParameterError
from nearstep.torch.memferry import model_fingerprint
from nearstep.torch.offload.errors import (
    BudgetError,
    ChangedModelError,
    EngineCopyError,
    LostEngineError,
    VectorWarning,
)
from nearstep.torch.offload.parameter import OffloadedParameter
from nearstep.torch.parameter import DeviceParameter
from nearstep.updater.device import KernelDevice

from . import training
from .models import WIDTH, Unlucky
from .training import alike, bits
from .training import steps as train

LAYER = 4 * (WIDTH * WIDTH + WIDTH)
URL = "golden:axdimm?memory_bytes=2MiB"

Model = nn.Sequential
Optimizer = nearstep.optim.AdamW


def made(device: str | nearstep.Device = URL) -> tuple[Model, Optimizer]:
    torch.manual_seed(9)
    layers = (nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    model = nn.Sequential(layers[0], Unlucky(ZeroDivisionError), layers[1], nn.Linear(WIDTH, WIDTH))
    return model, nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=device)


assert_like_plain = partial(training.assert_like_plain, make=made)


def loaded(model: Model, optimizer: Optimizer, saved: Any) -> None:
    """It trains as if nothing had been, with a checkpoint."""
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    train(model, optimizer)
    assert_like_plain(model, optimizer)


@pytest.mark.parametrize(
    ("where", "updates"),
    [("forward", "at-step"), ("forward", "in-backward"), ("backward", "at-step")],
)
def test_an_exception_leaves_the_state_before_the_step(where: str, updates: str) -> None:
    model, optimizer = made()
    engine = nearstep.offload(model, optimizer, budget=2 * LAYER, updates=updates)  # type: ignore[arg-type]
    before = bits(model.state_dict()), bits(optimizer.state_dict())
    failing = model[1]
    failing.where = where
    for _ in range(3):
        with pytest.raises(ZeroDivisionError):
            train(model, optimizer)
    assert (bits(model.state_dict()), bits(optimizer.state_dict())) == before
    failing.where = None
    train(model, optimizer)
    assert_like_plain(model, optimizer)
    assert engine.report().peak <= engine.budget


def test_an_exception_in_backward_after_updates_is_not_passed_over() -> None:
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget=2 * LAYER, updates="in-backward")
    saved = copy.deepcopy(model.state_dict()), optimizer.state_dict()
    model[1].where = "backward"
    with pytest.raises(ZeroDivisionError):
        train(model, optimizer)
    model[1].where = None
    with pytest.raises(nearstep.torch.errors.EarlyUpdateError, match="before optim"):
        model(torch.ones(1, WIDTH))
    with pytest.raises(InterruptedStepError):
        optimizer.step()
    loaded(model, optimizer, saved)


def test_an_exception_in_a_hook_of_a_module() -> None:
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget=2 * LAYER)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    for register in (model[2].register_forward_hook, model[2].register_full_backward_hook):
        handle = register(fail)
        with pytest.raises(ZeroDivisionError):
            train(model, optimizer)
        handle.remove()
    train(model, optimizer)
    assert_like_plain(model, optimizer)


def test_a_run_that_fails_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = made()
    engine = nearstep.offload(model, optimizer, budget=2 * LAYER)
    saved = copy.deepcopy(model.state_dict()), optimizer.state_dict()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr("nearstep.torch.parameter.DeviceParameter.take_result", fail)
        with pytest.raises(ZeroDivisionError):
            train(model, optimizer)
    with pytest.raises(InterruptedStepError):
        train(model, optimizer)
    loaded(model, optimizer, saved)
    engine.close()
    assert_like_plain(model, optimizer)


def test_a_budget_smaller_than_a_layer() -> None:
    model, optimizer = made()
    with pytest.raises(BudgetError, match="one module") as raised:
        nearstep.offload(model, optimizer, budget=2 * LAYER - 1)
    assert (raised.value.expected, raised.value.actual) == (2 * LAYER, 2 * LAYER - 1)
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    nearstep.offload(model, optimizer, budget=raised.value.expected)
    train(model, optimizer)
    assert_like_plain(model, optimizer)


def test_a_budget_that_is_found_too_small_in_use_says_so_and_can_be_used_on() -> None:
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget=2 * LAYER)
    weights = [model[index].weight for index in (0, 2, 3)]
    with pytest.raises(BudgetError) as raised:
        torch.cat(weights)
    assert raised.value.actual == 2 * LAYER
    assert raised.value.expected == 3 * 4 * WIDTH * WIDTH
    held = [each.detach() for each in weights[:2]]  # memory that somebody has cannot go
    with pytest.raises(BudgetError, match=r"something refers to: 0\.weight, 2\.weight"):
        train(model, optimizer)
    del held
    train(model, optimizer)
    assert_like_plain(model, optimizer)


def raises_after(calls: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that Ctrl-C interrupts at its call of this number."""
    left = [calls]

    def called(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return called


def gfgb(model: Model) -> dict[str, Any]:
    """Options for a plan whose parameters do not fit at once."""
    layers = {str(index): Decision(Mode.GFGB) for index in (0, 2, 3)}
    print_ = model_fingerprint(model)
    plan = Plan(fingerprint=print_, budget_bytes=None, reserve=1.0, layers=layers)
    return {"policy": "memferry", "plan": plan}


INTERRUPTED = {
    "send": (DeviceParameter, "push", 3),
    "gradient": (DeviceParameter, "hold_gradient", 2),
    "make": (OffloadedParameter, "make", 2),
    "hooks": (nn.Module, "register_forward_pre_hook", 2),
}


@pytest.mark.parametrize("where", ["warning", "budget", *INTERRUPTED])
def test_an_exception_in_offload_leaves_a_plain_model(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    plain, its = made()
    for each in (model, plain):
        training.loss_of(each).backward()
    held = [model[index].weight.detach() for index in (0, 2)] if where == "budget" else []
    before = bits([model.state_dict(), [p.grad for p in model.parameters()]])
    with monkeypatch.context() as patched:
        if where in INTERRUPTED:
            of, name, calls = INTERRUPTED[where]
            patched.setattr(of, name, raises_after(calls, getattr(of, name)))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with pytest.raises((VectorWarning, BudgetError, KeyboardInterrupt)) as raised:
                nearstep.offload(
                    model,
                    optimizer,
                    budget=2 * LAYER,
                    **(gfgb(model) if where == "warning" else {}),
                )
    kinds = {"warning": VectorWarning, "budget": BudgetError}
    assert raised.type is kinds.get(where, KeyboardInterrupt)
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    assert bits([model.state_dict(), [p.grad for p in model.parameters()]]) == before
    for module in model.modules():
        assert not module._forward_pre_hooks
        assert not module._state_dict_pre_hooks
        assert module._compiled_call_impl is None
    del held
    for each in (optimizer, its):
        each.step()
    with nearstep.offload(model, optimizer, budget=2 * LAYER) as engine:
        train(model, optimizer)
        assert engine.report().peak <= engine.budget
    train(plain, its)
    assert bits([model.state_dict(), optimizer.state_dict()]) == bits(
        [plain.state_dict(), its.state_dict()]
    )


def test_an_offload_that_is_refused_leaves_nothing_that_traces() -> None:
    model, optimizer = made()
    held = [each.detach() for each in model.parameters()]
    with pytest.raises(BudgetError, match="refers to"):
        nearstep.offload(model, optimizer, budget=2 * LAYER, policy="memferry")
    assert len(held) == 6
    assert [each._compiled_call_impl for each in model.modules()] == [None] * 5


@pytest.mark.parametrize("calls", [1, 3, 6])
def test_a_close_that_is_interrupted_can_be_called_again(
    calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = made()
    engine = nearstep.offload(model, optimizer, budget=2 * LAYER)
    train(model, optimizer)
    with monkeypatch.context() as patched:
        patched.setattr(OffloadedParameter, "end", raises_after(calls, OffloadedParameter.end))
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    engine.close()
    assert engine.closed
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    assert_like_plain(model, optimizer)


OTHER = nn.Parameter(torch.zeros(WIDTH, WIDTH))
CHANGES: dict[str, Callable[[Model, Optimizer], object]] = {
    "4.weight was added": lambda m, _: m.append(nn.Linear(WIDTH, WIDTH)),
    "2.weight was replaced": lambda m, _: setattr(m[2], "weight", OTHER),
    "3.weight was removed": lambda m, _: m.pop(3),
    "parameter 0 of group 1 was added": lambda _, optimizer: optimizer.add_param_group(
        {"params": [nn.Parameter(torch.zeros(WIDTH))]}
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_other_parameters_after_offload_are_refused_by_name(name: str) -> None:
    model, optimizer = made()
    nearstep.offload(model, optimizer, budget="100%")
    train(model, optimizer)
    CHANGES[name](model, optimizer)
    with pytest.raises(ChangedModelError, match=name):
        model(torch.ones(1, WIDTH))
    with pytest.raises(ChangedModelError, match=name):
        optimizer.step()


def test_names_in_a_checkpoint_of_the_optimizer_may_be_others() -> None:
    def use(model, optimizer, _):
        train(model, optimizer)
        saved = optimizer.state_dict()
        group = saved["param_groups"][0]
        group["param_names"] = [f"a.{number}" for number in range(len(group["params"]))]
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["param_names"][0] == "a.0"
        train(model, optimizer)

    alike(use, made, budget=2 * LAYER)
    names = [("a", nn.Parameter(torch.zeros(WIDTH)))]
    model, _ = made()
    others = nearstep.optim.AdamW([*model.named_parameters(), *names], device=URL)
    nearstep.offload(model, others, budget=2 * LAYER)
    others.param_groups[0]["params"][-1] = nn.Parameter(torch.zeros(WIDTH))
    with pytest.raises(ChangedModelError, match="parameter a of group 0 was replaced"):
        others.step()


def scripted() -> tuple[nn.Module, Optimizer]:
    inner = torch.jit.script(nn.Linear(2, 2))
    return nn.Sequential(inner), nearstep.optim.AdamW(inner.parameters(), device=URL)


def tensor_class() -> tuple[nn.Module, Optimizer]:
    class Own(nn.Parameter):
        pass

    model = nn.Linear(2, 2)
    model.weight = Own(torch.zeros(2, 2))
    return model, nearstep.optim.AdamW(model.parameters(), device=URL)


def without_owner() -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(2, 2)
    return model, nearstep.optim.AdamW([model.weight], device=URL)


def double() -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(2, 2)
    other = nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)
    model.other = other
    return model, nearstep.optim.AdamW([model.weight, model.bias], device=URL)


def elsewhere() -> tuple[nn.Module, Optimizer]:
    model = nn.Linear(2, 2)
    model.other = nn.Parameter(torch.zeros(2, device="meta"), requires_grad=False)
    return model, nearstep.optim.AdamW([model.weight, model.bias], device=URL)


def lazy() -> tuple[nn.Module, Optimizer]:
    model = nn.LazyLinear(2)
    return model, nearstep.optim.AdamW(model.parameters(), device=URL)


def twice() -> tuple[nn.Module, Optimizer]:
    model, optimizer = made()
    model.engine = nearstep.offload(model, optimizer, budget="100%")
    return model, optimizer


def of_torch() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(2, 2)
    return model, torch.optim.AdamW(model.parameters())


@pytest.mark.filterwarnings("ignore:.*torch.jit.script", "ignore:Lazy modules")
@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (scripted, ParameterError, "module '0' must be written in Python"),
        (tensor_class, ParameterError, "weight must be of class Parameter, not Own"),
        (without_owner, ParameterError, "bias must be frozen or in a group"),
        (double, ParameterError, "other must be of a dtype"),
        (elsewhere, ParameterError, "other must be on the CPU or an accelerator, not on meta"),
        (lazy, ParameterError, "weight must be of class Parameter, not Uninit"),
        (twice, ParameterError, "no engine yet"),
        (of_torch, ParameterError, "nearstep.optim, not AdamW"),
    ],
)
def test_what_cannot_be_offloaded(
    make: Callable[[], tuple[nn.Module, torch.optim.Optimizer]], error: type[Exception], text: str
) -> None:
    model, optimizer = make()
    classes = [type(each) for each in model.parameters()]
    with pytest.raises(error, match=text):
        nearstep.offload(model, optimizer, budget="500%")
    assert [type(each) for each in model.parameters()] == classes


@pytest.mark.parametrize("option", [{"policy": "best"}, {"updates": "soon"}])
def test_options_that_there_are_not(option: dict[str, str]) -> None:
    model, optimizer = made()
    with pytest.raises(ArgumentError, match=next(iter(option))):
        nearstep.offload(model, optimizer, budget="100%", **option)  # type: ignore[arg-type]


def test_an_engine_is_not_copied() -> None:
    model, optimizer = made()
    engine = nearstep.offload(model, optimizer, budget="100%")
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(EngineCopyError):
            copied(engine)


def test_a_closed_device() -> None:
    with nearstep.open(URL) as device:
        assert isinstance(device, KernelDevice)
        model, optimizer = made(device)
        engine = nearstep.offload(model, optimizer, budget=2 * LAYER)
    with pytest.raises(ClosedDeviceError):
        model(torch.ones(1, WIDTH))
    with pytest.raises(ClosedDeviceError):
        engine.close()
    assert not engine.closed


def test_a_forward_and_backward_with_a_changed_parameter_between_is_refused_as_in_torch() -> None:
    def use(model, optimizer, _):
        train(model, optimizer)
        loss = model(torch.ones(1, WIDTH)).sum()
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()

    alike(use, made, budget=2 * LAYER)


def test_an_activation_that_was_changed_is_found_as_in_torch() -> None:
    def use(model, optimizer, _):
        hidden = torch.tanh(model[0](torch.ones(1, WIDTH)))
        loss = model[2](hidden).sum()
        hidden.detach().mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        optimizer.zero_grad()

    alike(use, made, budget=2 * LAYER)


def test_all_goes_when_nobody_refers_to_it() -> None:
    model, optimizer = made()
    engine = nearstep.offload(model, optimizer, budget=2 * LAYER)
    train(model, optimizer)
    weight = model[0].weight
    gone = [weakref.ref(each) for each in (engine, model, optimizer, model[2].weight)]
    del engine, model, optimizer
    gc.collect()
    assert [each() for each in gone] == [None] * 4
    with pytest.raises(LostEngineError):
        weight.sum()
