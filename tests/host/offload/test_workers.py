"""Workers that train an offloaded model together have the bits of torch's DDP alone."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nearstep
from nearstep.torch.errors import GradientError, ParameterError, UnsupportedOptionError
from nearstep.torch.offload.errors import AveragingError, BudgetError, LostWorkerError, WrapperError

from .models import KINDS, WIDTH
from .training import COMPUTE, GOLDEN, OPTIMIZERS, Plan, bits, computes
from .workers import Case, compare, on_workers

SMALL: dict[str, Any] = {"find_unused_parameters": True, "bucket_cap_mb": 0.002}
"""Buckets of some 2 KiB, from the first step on."""

LISTED: dict[str, Any] = {"bucket_cap_mb_list": [0.001, 0.003]}

EACH: dict[str, Any] = {"bucket_cap_mb_list": [1e-6]}
"""Torch, too, sums each gradient by itself: sums of three have an order that depends on buckets."""

CASES = [
    Case(plan=Plan(kind="stack", evaluates=True, passes=2), wrapper=SMALL, share=1.3),
    Case(
        plan=Plan(kind="tied", optimizer="momentum", steps=3),
        wrapper=LISTED,
        places=5,
        platform="axdimm",
    ),
    Case(plan=Plan(kind="branches", passes=2, keeps=True, steps=3), wrapper=SMALL, share=2.0),
    Case(plan=Plan(kind="frozen"), wrapper=LISTED, offload={"updates": "in-backward"}),
    Case(plan=Plan(kind="convolutions", evaluates=True), wrapper={}, places=6),
    Case(plan=Plan(kind="backwards", passes=2), wrapper={}),
    Case(plan=Plan(kind="checkpoint", steps=3), wrapper={"bucket_cap_mb": 0.001}, places=7),
]


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


def stack(count: int = 4) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(count)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(count)))
    model.to(COMPUTE)
    return model, nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=GOLDEN)


def loss_of(model: nn.Module, number: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * number + dist.get_rank())
    return model(torch.randn(4, WIDTH, generator=generator).to(COMPUTE)).square().mean()


def step(model: nn.Module, optimizer: Any, number: int = 0) -> None:
    optimizer.zero_grad()
    loss_of(model, number).backward()
    optimizer.step()


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
    for options in (
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"skip_all_reduce_unused_params": True},
    ):
        model, optimizer = stack()
        ddp = DistributedDataParallel(model, **options)
        with pytest.raises(UnsupportedOptionError, match=next(iter(options))):
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
    results = []
    for offloaded in (False, True):
        model, optimizer = stack()
        ddp = DistributedDataParallel(model, **SMALL)
        engine = nearstep.offload(ddp, optimizer, budget="300%") if offloaded else None
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
        grads = [each.grad for each in (*model.parameters(), *twin.parameters())]
        results.append((bits(model.state_dict()), bits(grads)))
    assert results[0] == results[1]


def gradients_that_are_read_are_averages() -> None:
    results = []
    for offloaded in (False, True):
        model, optimizer = stack()
        ddp = DistributedDataParallel(model, **SMALL)
        engine = nearstep.offload(ddp, optimizer, budget="500%") if offloaded else None
        for number in range(2):  # what was read is added to
            loss_of(ddp, number).backward()
            results.append(bits([each.grad.clone() for each in model.parameters()]))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        optimizer.step()
        results.append((norm.item(), bits(model.state_dict())))
        if engine is not None:
            engine.close()
    assert results[:3] == results[3:]
    assert len(results) == 6


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
    results = []
    for offloaded in (False, True):
        model, optimizer = stack()
        model[0].requires_grad_(False)
        ddp = DistributedDataParallel(model, **SMALL)
        engine = nearstep.offload(ddp, optimizer, budget="300%") if offloaded else None
        for number in range(6):
            if number == 2:
                model[0].requires_grad_(True)
            model[2].requires_grad_(number in (1, 2, 5))
            step(ddp, optimizer, number)
            results.append(bits(model.state_dict()))
        if engine is not None:
            engine.close()
    assert results[:6] == results[6:]
    assert len({str(each) for each in results}) == 6


def it_makes_no_difference_which_worker_has_which_data() -> None:
    """A sum of two gradients has the same bits in both orders."""
    results = []
    for offloaded, shift in ((False, 0), (True, 0), (True, 1)):
        model, optimizer = stack()
        ddp = DistributedDataParallel(model)
        engine = nearstep.offload(ddp, optimizer, budget="200%") if offloaded else None
        for number in range(3):
            optimizer.zero_grad()
            generator = torch.Generator().manual_seed(2 * number + (shift + dist.get_rank()) % 2)
            x = torch.randn(4, WIDTH, generator=generator).to(COMPUTE)
            ddp(x).square().mean().backward()
            optimizer.step()
        results.append((bits(model.state_dict()), bits(optimizer.state_dict())))
        if engine is not None:
            engine.close()
    assert results[0] == results[1] == results[2]


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
    results: list[Any] = []
    for offloaded in (False, True):
        torch.manual_seed(1)
        model = OneOf().to(COMPUTE)
        optimizer = nearstep.optim.AdamW(model.parameters(), lr=1e-2, device=GOLDEN)
        ddp = DistributedDataParallel(model, find_unused_parameters=True)
        engine = nearstep.offload(ddp, optimizer, budget="200%") if offloaded else None
        for first, last in PASSES:
            optimizer.zero_grad()
            model.used = first
            with ddp.no_sync():
                loss_of(ddp).backward()
            model.used = last
            loss_of(ddp, 1).backward()
            optimizer.step()
            results.append(bits(model.state_dict()))
        if engine is not None:
            engine.close()
    assert results[: len(PASSES)] == results[len(PASSES) :]
    assert len({str(each) for each in results}) == len(PASSES) == 5


def a_gradient_in_a_graph_is_refused() -> None:
    model, optimizer = stack()
    ddp = DistributedDataParallel(model, **SMALL)
    engine = nearstep.offload(ddp, optimizer, budget="500%")
    loss = loss_of(ddp)
    with pytest.raises(GradientError, match="create_graph"):
        loss.backward(create_graph=True)
    engine.close()


class Unlucky(nn.Module):
    """Raises in its forward, if it is asked to."""

    raises = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.raises:
            raise OSError("in the user's program")
        return x


def an_exception_in_every_workers_forward_changes_nothing() -> None:
    results = []
    for offloaded in (False, True):
        model, optimizer = stack()
        model.append(Unlucky())
        ddp = DistributedDataParallel(model, **SMALL)
        engine = nearstep.offload(ddp, optimizer, budget="300%") if offloaded else None
        for number in range(3):
            model[-1].raises = number == 1
            if number == 1:
                with pytest.raises(OSError, match="user's program"):
                    step(ddp, optimizer, number)
            else:
                step(ddp, optimizer, number)
        results.append((bits(model.state_dict()), bits(optimizer.state_dict())))
        if engine is not None:
            engine.close()
    assert results[0] == results[1]


def an_exception_in_one_workers_forward_leaves_state_as_it_was() -> None:
    model, optimizer = stack()
    model.append(Unlucky())
    ddp = DistributedDataParallel(model, **SMALL)
    engine = nearstep.offload(ddp, optimizer, budget="300%")
    step(ddp, optimizer)
    before = bits(model.state_dict()), bits(optimizer.state_dict())
    model[-1].raises = dist.get_rank() == 1
    if model[-1].raises:
        with pytest.raises(OSError, match="user's program"):
            step(ddp, optimizer, 1)
        dist.destroy_process_group()
    else:
        with pytest.raises(LostWorkerError, match="another worker did not take part"):
            step(ddp, optimizer, 1)
        with pytest.raises(AveragingError, match="not averaged"):
            optimizer.step()
        optimizer.zero_grad()
    assert (bits(model.state_dict()), bits(optimizer.state_dict())) == before
    assert engine.report().peak <= engine.report().budget
    engine.close()
    assert (bits(model.state_dict()), bits(optimizer.state_dict())) == before


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
