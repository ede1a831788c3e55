"""Workers that train an offloaded model together have the bits of torch's DDP alone."""

from __future__ import annotations

import copy
import random
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nearstep
from nearstep.torch.errors import GradientError, ParameterError, UnsupportedOptionError
from nearstep.torch.offload.errors import AveragingError, BudgetError, LostWorkerError, WrapperError

from . import training
from .models import KINDS, WIDTH, Unlucky
from .training import COMPUTE, GOLDEN, OPTIMIZERS, Made, Plan, bits, computes, stack, state_of
from .workers import Case, compare, on_workers

SMALL: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 0.002}
"""Buckets of some 2 KiB, from the first step on."""

LISTED: dict[str, Any] = {"bucket_cap_mb_list": [0.001, 0.003]}

EACH: dict[str, Any] = {"bucket_cap_mb_list": [1e-6]}
"""Torch, too, sums each gradient by itself: sums of three have an order that depends on buckets."""

CASES = [
    Case(plan=Plan(kind="stack", evaluates=True, passes=2), wrapper=SMALL, share=1.3),
    Case(plan=Plan(kind="tied", optimizer="momentum", steps=3), wrapper=LISTED, places=5,
        platform="axdimm"),
    Case(plan=Plan(kind="branches", passes=2, keeps=True, steps=3), wrapper=SMALL, share=2.0),
    Case(plan=Plan(kind="frozen"), wrapper=LISTED, offload={"updates": "in-backward"}),
    Case(plan=Plan(kind="convolutions", evaluates=True), wrapper={}, places=6),
    Case(plan=Plan(kind="backwards", passes=2), wrapper={}),
    Case(plan=Plan(kind="checkpoint", steps=3), wrapper={"bucket_cap_mb": 0.001}, places=7),
]  # fmt: skip


def check(count: int, cases: list[Case], timeout_s: float = 120.0) -> None:
    """Each worker compares with plain training; all of them have the same."""
    cases = [case for case in cases if computes(case.plan.kind)]
    found = on_workers(count, compare, cases, timeout_s=timeout_s)
    assert len(found) == count
    each_twice = [case for case in cases for _ in range(2)]
    checked = 0
    for own in found:
        for mine, first, case in zip(own, found[0], each_twice, strict=True):
            assert mine[:2] == first[:2], case
            report = mine[2]
            assert report.gradients > 0
            checked += 1
    assert checked == 2 * count * len(cases)
    assert len(cases) > 3


def test_two_workers_have_the_bits_of_plain_training_together() -> None:
    check(2, CASES)


def random_cases(count: int, seed: int) -> list[Case]:
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        plan = Plan(
            kind=chance.choice([*KINDS, "branches", "backwards"]),
            optimizer=chance.choice(list(OPTIMIZERS)),
            steps=chance.randint(2, 4),
            passes=chance.randint(1, 3),
            evaluates=chance.random() < 0.5,
            keeps=chance.random() < 0.3,
            seed=chance.randrange(1 << 20),
        )
        wrapper: dict[str, Any] = EACH
        if plan.kind != "reentrant" and (plan.kind == "branches" or chance.random() < 0.5):
            wrapper = EACH | {"find_unused_parameters": True}
        early = plan.passes == 1 and not plan.keeps and chance.random() < 0.5
        found.append(
            Case(
                plan=plan,
                wrapper=wrapper,
                offload={"updates": "in-backward"} if early else {},
                share=chance.choice((1.01, 1.3, 2.0, 5.0)),
                places=chance.choice((None, chance.randrange(1 << 20))),
                platform=chance.choice((None, "axdimm")),
            )
        )
    return found


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4))
def test_three_workers_have_the_bits_of_plain_training_together(seed: int) -> None:
    print(f"seed {seed}")
    check(3, random_cases(15, seed), timeout_s=900.0)


# What is refused, and what goes wrong


def loss_of(model: nn.Module, number: int = 0) -> torch.Tensor:
    return training.loss_of(model, 10 * number + dist.get_rank())


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    training.step(model, optimizer, 10 * number + dist.get_rank())


def wrapped_alike(use: Any, budget: str = "300%", make: Any = stack, **wrapper: Any) -> None:
    """Use a wrapped model in one way, plain and offloaded: all bits are equal."""
    results = []
    for offloaded in (False, True):
        model, optimizer = make()
        ddp = DistributedDataParallel(model, **wrapper)
        engine = nearstep.offload(ddp, optimizer, budget=budget) if offloaded else None
        with engine or nullcontext():
            seen = bits(use(model, ddp, optimizer, engine))
            results.append((seen, state_of(model, optimizer)))
    assert results[0] == results[1]


def wrong_order_is_refused_before_anything_is_touched() -> None:
    model, optimizer = stack()
    before = bits(model.state_dict())
    with nearstep.offload(model, optimizer, budget="200%") as engine:
        with pytest.raises(WrapperError, match="offloaded before it was wrapped"):
            DistributedDataParallel(model)
        assert engine.report().fetches == 0
        step(model, optimizer)
    assert bits(model.state_dict()) != before

    model, optimizer = stack()
    ddp = DistributedDataParallel(model)
    before = bits(model.state_dict())
    with nearstep.offload(model, optimizer, budget="300%"):
        with pytest.raises(WrapperError, match="inside of the wrapper"):
            ddp(torch.ones(1, WIDTH, device=COMPUTE))
        with pytest.raises(WrapperError, match="offloaded before"):
            DistributedDataParallel(model)
    assert bits(model.state_dict()) == before

    model, optimizer = stack()
    model[1] = DistributedDataParallel(model[1])
    with pytest.raises(WrapperError, match="part of the model"):
        nearstep.offload(model, optimizer, budget="300%")


def options_of_the_wrapper_are_refused_by_name() -> None:
    for option in ("static_graph", "gradient_as_bucket_view", "skip_all_reduce_unused_params"):
        model, optimizer = stack()
        ddp = DistributedDataParallel(model, **{option: True})
        with pytest.raises(UnsupportedOptionError, match=option):
            nearstep.offload(ddp, optimizer, budget="300%")
        assert isinstance(ddp.reducer, dist.Reducer)

    model, optimizer = stack()
    elsewhere = DistributedDataParallel(nn.Linear(2, 2, device="meta"), init_sync=False)
    with pytest.raises(ParameterError, match="weight must be on the CPU or an accelerator"):
        nearstep.offload(elsewhere, optimizer, budget="300%")
    ddp = DistributedDataParallel(model, **SMALL)
    with nearstep.offload(ddp, optimizer, budget="300%"):
        with pytest.raises(ParameterError, match="no engine yet"):
            nearstep.offload(ddp, optimizer, budget="300%")
        with pytest.raises(UnsupportedOptionError, match="join"), ddp.join():
            pass
        with pytest.raises(UnsupportedOptionError, match="register_comm_hook"):
            ddp.register_comm_hook(None, average_hook)
    ddp.register_comm_hook(None, average_hook)
    with pytest.raises(UnsupportedOptionError, match="register_comm_hook"):
        nearstep.offload(ddp, optimizer, budget="300%")


def average_hook(state, bucket):
    raise AssertionError("hooks are refused")


def a_budget_needs_no_room_besides_one_module() -> None:
    """Whatever buckets torch would have; `peak` with gradients that wait for their turn, too."""
    layer = 4 * WIDTH * (WIDTH + 1)
    for options in (SMALL, {}):
        model, optimizer = stack(8)
        ddp = DistributedDataParallel(model, **options)
        with pytest.raises(BudgetError, match="of one module") as caught:
            nearstep.offload(ddp, optimizer, budget=1)
        assert caught.value.expected == 2 * layer
        assert isinstance(ddp.reducer, dist.Reducer)
        held = [each[:] for each in model.parameters()]
        with pytest.raises(BudgetError, match="something refers to"):
            nearstep.offload(ddp, optimizer, budget=caught.value.expected)
        del held
        assert isinstance(ddp.reducer, dist.Reducer)
        engine = nearstep.offload(ddp, optimizer, budget=caught.value.expected)
        step(ddp, optimizer)
        assert layer < engine.report().peak <= caught.value.expected
        engine.close()


def the_wrapper_works_on_by_itself_when_the_engine_is_closed() -> None:
    def use(model, ddp, optimizer, engine):
        step(ddp, optimizer)
        loss_of(ddp)  # without backward
        step(ddp, optimizer, 1)
        twin = copy.deepcopy(ddp)
        loss_of(twin).backward()
        if engine is not None:
            engine.close()
            engine.close()
            assert isinstance(ddp.reducer, dist.Reducer)
        step(ddp, optimizer, 2)
        return [each.grad for each in (*model.parameters(), *twin.parameters())]

    wrapped_alike(use, **SMALL)


def gradients_that_are_read_are_averages() -> None:
    def use(model, ddp, optimizer, _):
        seen = []
        for number in range(2):  # what was read is added to
            loss_of(ddp, number).backward()
            seen.append([each.grad.clone() for each in model.parameters()])
        seen.append(nn.utils.clip_grad_norm_(model.parameters(), 1e-3))
        optimizer.step()
        return seen

    wrapped_alike(use, "500%", **SMALL)


def a_parameter_without_a_gradient_is_named_before_the_step() -> None:
    model, optimizer = stack()
    ddp = DistributedDataParallel(model, bucket_cap_mb_list=[0.002])
    extra = nn.Linear(WIDTH, WIDTH, device=COMPUTE)
    model.append(extra)
    ddp.module.forward = lambda x: nn.Sequential.forward(model[:-1], x)  # type: ignore[method-assign]
    optimizer.add_param_group({"params": extra.parameters()})
    before = bits(model.state_dict())
    with nearstep.offload(ddp, optimizer, budget="300%"):
        for _ in range(2):
            loss_of(ddp).backward()
            with pytest.raises(AveragingError, match=r"^4\.\w+ got no gradient.*find_unused"):
                optimizer.step()
            with pytest.raises(AveragingError, match="backward failed"):
                optimizer.step()
            optimizer.zero_grad()
        loss_of(ddp).backward()
        with pytest.raises(AveragingError, match="got no gradient"):
            loss_of(ddp)
    assert bits(model.state_dict()) == before


def layers_are_frozen_and_thawed_later() -> None:
    """What was frozen when it was wrapped is not averaged afterwards, as in torch."""

    def make() -> Made:
        model, optimizer = stack()
        model[0].requires_grad_(False)
        return model, optimizer

    def use(model, ddp, optimizer, _):
        results = []
        for number in range(6):
            if number == 2:
                model[0].requires_grad_(True)
            model[2].requires_grad_(number in (1, 2, 5))
            step(ddp, optimizer, number)
            results.append(bits(model.state_dict()))
        assert len({str(each) for each in results}) == 6
        return results

    wrapped_alike(use, make=make, **SMALL)


def it_makes_no_difference_which_worker_has_which_data() -> None:
    """A sum of two gradients has the same bits in both orders."""
    seen = []

    def use(model, ddp, optimizer, engine, shift):
        for number in range(3):
            seed = 2 * number + (shift + dist.get_rank()) % 2
            training.step(ddp, optimizer, seed)
        seen.append(state_of(model, optimizer))

    for shift in (0, 1):
        wrapped_alike(partial(use, shift=shift), "200%")
    assert len(seen) == 4
    assert seen[0] == seen[1] == seen[2] == seen[3]


class OneOf(nn.Module):
    """Layers of which a pass uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.used: tuple[int, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in self.used:
            x = torch.tanh(self.layers[index](x))
        return x


PASSES = [((0, 1), (0,)), ((0,), (0, 1)), ((1, 2), (2, 0)), ((3,), (0, 1, 2)), ((0, 3), (3,))]
"""Layers that a pass without averaging uses, and one with it."""


def parameters_that_a_pass_does_not_use_are_as_in_torch() -> None:
    def make() -> Made:
        torch.manual_seed(1)
        model = OneOf().to(COMPUTE)
        return model, nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=GOLDEN)

    def use(model, ddp, optimizer, _):
        results = []
        for first, last in PASSES:
            optimizer.zero_grad()
            model.used = first
            with ddp.no_sync():
                loss_of(ddp).backward()
            model.used = last
            loss_of(ddp, 1).backward()
            optimizer.step()
            results.append(bits(model.state_dict()))
        assert len({str(each) for each in results}) == len(PASSES) == 5
        return results

    wrapped_alike(use, "200%", make, find_unused_parameters=True)


def a_gradient_in_a_graph_is_refused() -> None:
    model, optimizer = stack()
    ddp = DistributedDataParallel(model, **SMALL)
    engine = nearstep.offload(ddp, optimizer, budget="500%")
    loss = loss_of(ddp)
    with pytest.raises(GradientError, match="create_graph"):
        loss.backward(create_graph=True)
    engine.close()


def unlucky() -> Made:
    model, optimizer = stack()
    model.append(Unlucky())
    return model, optimizer


def an_exception_in_every_workers_forward_changes_nothing() -> None:
    def use(model, ddp, optimizer, _):
        for number in range(3):
            model[-1].where = "forward" if number == 1 else None
            raised = pytest.raises(OSError, match="user's program")
            with raised if number == 1 else nullcontext():
                step(ddp, optimizer, number)

    wrapped_alike(use, make=unlucky, **SMALL)


def an_exception_in_one_workers_forward_leaves_state_as_it_was() -> None:
    model, optimizer = unlucky()
    ddp = DistributedDataParallel(model, **SMALL)
    engine = nearstep.offload(ddp, optimizer, budget="300%")
    step(ddp, optimizer)
    before = state_of(model, optimizer)
    model[-1].where = "forward" if dist.get_rank() == 1 else None
    if model[-1].where:
        with pytest.raises(OSError, match="user's program"):
            step(ddp, optimizer, 1)
        dist.destroy_process_group()
    else:
        with pytest.raises(LostWorkerError, match="another worker did not take part"):
            step(ddp, optimizer, 1)
        with pytest.raises(AveragingError, match="not averaged"):
            optimizer.step()
        optimizer.zero_grad()
    assert state_of(model, optimizer) == before
    assert engine.report().peak <= engine.report().budget
    engine.close()
    assert state_of(model, optimizer) == before


FAULTS = (
    wrong_order_is_refused_before_anything_is_touched,
    options_of_the_wrapper_are_refused_by_name,
    a_budget_needs_no_room_besides_one_module,
    the_wrapper_works_on_by_itself_when_the_engine_is_closed,
    gradients_that_are_read_are_averages,
    a_parameter_without_a_gradient_is_named_before_the_step,
    layers_are_frozen_and_thawed_later,
    it_makes_no_difference_which_worker_has_which_data,
    parameters_that_a_pass_does_not_use_are_as_in_torch,
    a_gradient_in_a_graph_is_refused,
    an_exception_in_every_workers_forward_changes_nothing,
    an_exception_in_one_workers_forward_leaves_state_as_it_was,  # the last: the group ends with it
)


def run_faults() -> list[str]:
    for each in FAULTS:
        each()
    return [each.__name__ for each in FAULTS]


@pytest.mark.deep
def test_what_is_refused_and_what_goes_wrong() -> None:
    """In one group, as it takes seconds to start: a failure names its function."""
    assert on_workers(2, run_faults) == [[each.__name__ for each in FAULTS]] * 2
    assert len(FAULTS) == 12
