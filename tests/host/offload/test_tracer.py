"""Policy memferry without plan or profile: the first step is profiled, the rest has its plan."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

import nearstep
from nearstep.errors import ArgumentError
from nearstep.memferry.plan import check
from nearstep.memferry.planner import make
from nearstep.memferry.profile import Profile
from nearstep.torch.memferry import Profiling, profile
from nearstep.torch.offload import Engine

from .models import KINDS, WIDTH, Unlucky
from .test_equality import random_plans
from .training import Plan, Result, assert_equal, bits, in_least, made, train, train_made

DEVICE = "golden:axdimm?memory_bytes=2MiB&rules=adam,sgd,sgd_momentum,adagrad"
SEED = 90217

pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")


def planned(
    plan: Plan, budget: int, platform: str | None = None, **options: Any
) -> tuple[Result, Engine]:
    """Train with a plan of the first step."""
    model, optimizer = made(plan)
    engine = nearstep.offload(model, optimizer, policy="memferry", budget=budget, **options)
    return train_made(plan, model, optimizer, engine, platform), engine


def planned_in_least(plan: Plan, platform: str | None = None) -> tuple[Result, Engine]:
    """The same with the smallest budget there is."""
    found: tuple[Result, Engine] = in_least(lambda budget: planned(plan, budget, platform))
    return found


def check_random_trainings(count: int, seed: int) -> None:
    print(f"seed {seed}")
    checked = 0
    for number, (plan, share, _) in enumerate(random_plans(count, seed)):
        plan = replace(plan, device=DEVICE)
        plain = train(plan)
        platform = (None, "axdimm")[number % 2]
        least = planned_in_least(plan, platform)
        assert least[0].report is not None
        more = int(least[0].report.budget * share) + 1
        found = [least, planned(plan, more, platform)]
        if plan.passes == 1 and not plan.keeps:
            found.append(planned(plan, more, platform, updates="in-backward"))
        for result, engine in found:
            assert_equal(result, plain)
            assert result.report is not None
            assert result.report.peak <= result.report.budget, plan
            assert engine.plan is not None
            assert engine.profile is not None
            assert engine.shadow is not None
            assert engine.plan == make(engine.profile, budget=engine.budget).plan
            check(engine.plan, make(engine.profile, budget=engine.budget).costs)
            checked += 1
    assert checked >= 2 * count


def test_random_trainings_are_planned_in_their_first_step() -> None:
    check_random_trainings(1, SEED)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(10))
def test_many_random_trainings(seed: int) -> None:
    check_random_trainings(25, seed)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_is_planned(kind: str) -> None:
    plan = Plan(kind=kind, device=DEVICE, steps=3)
    result, engine = planned_in_least(plan)
    assert_equal(result, train(plan))
    assert engine.plan is not None


# What is profiled


INPUTS = {n: torch.randn(n, WIDTH, generator=torch.Generator().manual_seed(3)) for n in (64, 999)}


def loss_of(model: nn.Module, rows: int = 64) -> Tensor:
    return model(INPUTS[rows]).square().mean()


def profile_of(model: nn.Module, **machine: Any) -> Profile:
    """What a model computes by itself, without the loss."""
    with torch.no_grad():
        gradient = torch.ones_like(model(INPUTS[64]))
    return profile(model, lambda: model(INPUTS[64]).backward(gradient), **machine)


A100 = {"platform": "memferry-a100", "gpu": "gpu0"}


def step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    loss_of(model).backward()
    optimizer.step()


def opened(kind: str = "stack", **options: Any) -> tuple[nn.Module, Any, Engine]:
    model, optimizer = made(Plan(kind=kind, device=DEVICE))
    options = {"policy": "memferry", "budget": "80%", **options}
    return model, optimizer, nearstep.offload(model, optimizer, **options)


@pytest.mark.parametrize("kind", ["stack", "tied", "functional", "frozen", "convolutions"])
def test_the_profile_is_that_of_the_model_alone(kind: str) -> None:
    plain, _ = made(Plan(kind=kind, device=DEVICE))
    expected = profile_of(plain, **A100)
    model, optimizer, engine = opened(kind, budget="200%")
    with engine:
        assert engine.plan is engine.profile is engine.shadow is None
        step(model, optimizer)
        assert engine.profile is not None
        assert engine.profile.fingerprint == expected.fingerprint
        assert len(engine.profile.layers) >= 2
        assert engine.profile.layers == expected.layers


def test_checkpointing_may_stop_within_a_layer() -> None:
    """What it computes anew ends with the last tensor that was saved: that is no failure."""

    class Blocks(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            for block in self:
                x = x + checkpoint(block, x, use_reentrant=False)
            return x

    def blocks() -> nn.Module:
        return Blocks(
            *(nn.Sequential(nn.Linear(WIDTH, 9), nn.ReLU(), nn.Linear(9, WIDTH)) for _ in "abc")
        )

    plain = blocks()
    expected = profile_of(plain, **A100)
    model = blocks()
    optimizer = nearstep.optim.AdamW(model.parameters(), device=DEVICE)
    with nearstep.offload(model, optimizer, policy="memferry", budget="200%") as engine:
        step(model, optimizer)
        assert engine.profile is not None
        assert len(engine.profile.layers) == 6
        assert engine.profile.layers == expected.layers


def test_a_machine_may_be_named() -> None:
    plain, _ = made(Plan(kind="stack", device=DEVICE))
    expected = profile_of(plain, platform="axdimm", host="axdimm.0", host_params_per_s=2e9)
    machine = Profiling(platform="axdimm", gpu="gpu", host="axdimm.0", host_params_per_s=2e9)
    model, optimizer, engine = opened(profile=machine)
    with engine:
        step(model, optimizer)
        assert engine.profile is not None
        assert engine.profile.layers == expected.layers
    for wrong in (Profiling(gpu="tpu"), Profiling(host_params_per_s=0.0)):
        with pytest.raises(ArgumentError):
            opened(profile=wrong)


def test_what_is_no_training_does_not_count() -> None:
    profiles = []
    for disturbed in (False, True):
        model, optimizer, engine = opened()
        with engine:
            if disturbed:
                with torch.no_grad():
                    loss_of(model, 999)
                with torch.inference_mode():
                    loss_of(model, 999)
                optimizer.step()
                assert engine.plan is None
            loss_of(model).backward()
            if disturbed:
                torch.randn(999, 99) @ torch.randn(99, 99)
                model.state_dict()
                with torch.no_grad():
                    loss_of(model, 999)
            optimizer.step()
            profiles.append(engine.profile)
    assert profiles[0] is not None
    assert profiles[0] == profiles[1]


def test_several_backwards_before_a_step_add_up() -> None:
    found = []
    for passes in (1, 3):
        model, optimizer, engine = opened(budget="200%")
        with engine:
            for _ in range(passes):
                loss_of(model).backward()
                assert engine.plan is None
            optimizer.step()
            assert engine.profile is not None
            found.append(engine.profile.layers)
    checked = 0
    for one, three in zip(*found, strict=True):
        assert three.forward_s == pytest.approx(3 * one.forward_s)
        assert three.backward_s >= 3 * one.backward_s * (1 - 1e-9)  # gradients are added here
        assert three.gradient_bytes == one.gradient_bytes
        checked += 1
    assert checked == 8


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_a_pass_that_fails_is_profiled_anew(where: str, kind: type[BaseException]) -> None:
    results = []
    for offloaded, fails in ((False, True), (True, True), (True, False)):
        torch.manual_seed(SEED)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(4)]
        unlucky = Unlucky(kind)
        model = nn.Sequential(*layers[:2], unlucky, *layers[2:])
        optimizer = nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=DEVICE)
        engine = None
        if offloaded:
            engine = nearstep.offload(model, optimizer, policy="memferry", budget="80%")
        if fails:
            unlucky.where = where
            with pytest.raises(kind):
                loss_of(model, 999).backward()
            unlucky.where = None
        for _ in range(3):
            step(model, optimizer)
        results.append(bits(model.state_dict()))
        if engine is not None:
            assert engine.plan is not None
            results.append(engine.profile)
            engine.close()
    plain, failed, failed_profile, good, good_profile = results
    assert plain == failed == good
    assert failed_profile == good_profile


# The thread's modes


class Counting(TorchDispatchMode):
    """A mode of the user's."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def test_modes_of_the_program_are_left_as_they_were_entered() -> None:
    plain, plain_optimizer = made(Plan(kind="functional", device=DEVICE))
    profiles = []
    for where in ("nowhere", "offload", "forward", "step", "all"):
        mode = Counting()
        if where == "offload":
            with mode:
                model, optimizer, engine = opened("functional", budget="200%")
        else:
            model, optimizer, engine = opened("functional", budget="200%")
        if where in ("forward", "all"):
            mode.__enter__()
        loss = loss_of(model)
        if where == "forward":
            mode.__exit__(None, None, None)
        loss.backward()
        if where == "step":
            mode.__enter__()
        optimizer.step()
        if where in ("step", "all"):
            assert _get_current_dispatch_mode_stack() == [mode]
            mode.__exit__(None, None, None)
        assert _get_current_dispatch_mode_stack() == []
        assert mode.count or where in ("nowhere", "offload")
        profiles.append(engine.profile)
        engine.close()
    assert profiles[0] is not None
    assert profiles == [profiles[0]] * 5
    step(plain, plain_optimizer)
    assert bits(plain.state_dict()) == bits(model.state_dict())


def test_another_thread_may_train() -> None:
    plain, plain_optimizer = made(Plan(kind="stack", device=DEVICE))
    model, optimizer, engine = opened()
    left = []

    def work() -> None:
        torch.set_num_threads(1)
        for _ in range(2):
            step(model, optimizer)
        left.append(_get_current_dispatch_mode_stack())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    for _ in range(2):
        step(plain, plain_optimizer)
    assert left == [[]]
    assert engine.plan is not None
    assert bits(plain.state_dict()) == bits(model.state_dict())
    engine.close()


def test_copies_of_a_model_that_is_profiled_are_plain() -> None:
    model, optimizer, engine = opened()
    loss_of(model).backward()
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(type(each) is nn.Parameter for each in twin.parameters())
        twin(torch.ones(2, WIDTH))
    optimizer.step()
    assert engine.plan is not None
    engine.close()


@pytest.mark.parametrize("where", ["forward", "backward", "loss"])
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
def test_no_mode_is_outside_of_the_model(where: str, kind: type[BaseException]) -> None:
    """Neither after forward nor after an exception; the program may have modes of its own."""
    unlucky = Unlucky(kind)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), unlucky, nn.Linear(WIDTH, WIDTH))
    optimizer = nearstep.optim.AdamW(model.parameters(), device=DEVICE)
    engine = nearstep.offload(model, optimizer, policy="memferry", budget="200%")
    seen = []

    def fail() -> None:
        loss = loss_of(model)
        seen.append(_get_current_dispatch_mode_stack())
        if where == "loss":
            loss.register_hook(unlucky.fail)
        loss.backward()

    for mode in (None, Counting()):
        with nullcontext() if mode is None else mode:
            unlucky.where = where
            with pytest.raises(kind):
                fail()
            assert _get_current_dispatch_mode_stack() == ([] if mode is None else [mode])
        assert _get_current_dispatch_mode_stack() == []
        seen_before = mode.count if mode is not None else 0
        torch.ones(3) + 1
        assert mode is None or mode.count == seen_before
    unlucky.where = None
    assert len(seen) == (0 if where == "forward" else 2)
    assert all(isinstance(each, Counting) for modes in seen for each in modes)
    step(model, optimizer)
    assert engine.plan is not None
    engine.close()


@pytest.mark.parametrize("ends", ["closed", "dropped"])
def test_an_engine_that_never_steps_leaves_nothing(ends: str) -> None:
    model, optimizer, engine = opened()
    loss_of(model).backward()
    assert any(each._compiled_call_impl for each in model.modules())
    if ends == "closed":
        engine.close()
        assert engine.plan is None
        assert not any(each._compiled_call_impl for each in model.modules())
        return
    gone = weakref.ref(model)
    del model, optimizer, engine
    gc.collect()
    assert gone() is None
