"""Gradients of offloaded models that are compressed as backward makes them."""

from __future__ import annotations

import errno
import random
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import nearstep
from nearstep.errors import ArgumentError
from nearstep.storage.drive_errors import StorageError
from nearstep.torch.device_gradient import SparseGradient
from nearstep.torch.errors import GradientError, UnsupportedOptionError
from nearstep_sim.models.drive import FailAt

from ..overflow.jobs import drives
from .models import KINDS, WIDTH
from .training import COMPUTE, SEED, Plan, alike, bits, computes, in_least, run, stack, state_of

RULES = "rules=adam,sgd,sgd_momentum,adagrad"
CARD = f"golden:smartssd?{RULES}&memory_bytes=4MiB&chunk_bytes=512"
CARDS = f"golden:smartssd?{RULES}&memory_bytes=1MiB&chunk_bytes=512&subgroup_elements=256"
OPTIMIZERS: dict[str, Any] = {
    "adamw": nearstep.optim.AdamW,
    "sgd": nearstep.optim.SGD,
    "adagrad": nearstep.optim.Adagrad,
}
made = partial(stack, 3, device=CARD, compression=0.1)


def trained(
    plan: Plan, options: dict[str, Any], cards: int = 0, **offload: Any
) -> tuple[list[Any], Any]:
    """Bits of losses, model and optimizer; the report of the engine, or the traffic without."""
    torch.manual_seed(plan.seed)
    model = KINDS[plan.kind]().to(COMPUTE)
    with ExitStack() as stack:
        where: dict[str, Any] = {"device": CARD}
        if cards:
            store = stack.enter_context(drives(cards, 1200)).store
            where = {"device": f"{CARDS}&cards={cards}&drive=unused", "drives": store}
        trainable = [p for p in model.parameters() if p.requires_grad]
        optimizer = OPTIMIZERS[plan.optimizer](trainable, lr=1e-2, **options, **where)
        engine = nearstep.offload(model, optimizer, **offload) if offload else nullcontext()
        with engine:
            several = offload and (plan.passes > 1 or plan.keeps)
            with engine.accumulate() if several else nullcontext():
                losses = run(plan, model, optimizer)
            found = [losses, bits(model.state_dict()), bits(optimizer.state_dict())]
        return found, engine.report() if offload else optimizer.traffic


def trained_in_least(*arguments: Any, **offload: Any) -> tuple[list[Any], Any]:
    """The same with the smallest budget there is."""
    return in_least(lambda budget: trained(*arguments, budget=budget, **offload))


def assert_equal(plan: Plan, options: dict[str, Any], cards: int = 0, **offload: Any) -> None:
    """An offloaded training has the bits of a plain one, and sends what that sends."""
    plain, traffic = trained(plan, options, cards)
    found, report = trained_in_least(plan, options, cards, **offload)
    assert found == plain
    assert report.gradients_down == traffic.gradients_down > 0
    assert report.gradients_up == 0
    assert report.gradients > 0
    assert report.peak <= report.budget


@pytest.mark.parametrize("kind", ["stack", "tied", "checkpoint"])
@pytest.mark.parametrize("feedback", [True, False])
def test_training_has_the_bits_that_it_has_without_an_engine(kind: str, feedback: bool) -> None:
    assert_equal(Plan(kind=kind, steps=3), {"compression": 0.1, "error_feedback": feedback})


def test_updates_in_backward() -> None:
    options = {"compression": 0.1, "compression_format": "bf16"}
    assert_equal(Plan(kind="stack", steps=3), options, updates="in-backward", policy="on-demand")


@pytest.mark.parametrize("feedback", [True, False])
def test_cards_with_drives(feedback: bool) -> None:
    assert_equal(Plan(kind="stack"), {"compression": 0.05, "error_feedback": feedback}, 2)


@pytest.mark.parametrize(
    ("kind", "cards", "feedback", "form", "keeps"),
    [
        ("stack", 0, True, "fp32", False),
        ("tied", 0, False, "bf16", True),
        ("stack", 2, True, "fp32", False),
        ("stack", 3, False, "fp16", True),
    ],
)
def test_accumulated_gradients_are_compressed_by_the_step(
    kind: str, cards: int, feedback: bool, form: str, keeps: bool
) -> None:
    """Bits are those of torch's sum, compressed, as the optimizer makes it without an engine."""
    plan = Plan(kind=kind, steps=3, passes=3, keeps=keeps)
    options = {"compression": 0.1, "error_feedback": feedback, "compression_format": form}
    plain, traffic = trained(plan, options, cards)
    found, report = trained_in_least(plan, options, cards)
    assert found == plain
    assert report.gradients_up > 0
    assert report.gradients_down > traffic.gradients_down > 0
    assert report.peak <= report.budget


def test_the_last_backward_may_be_outside_of_accumulate() -> None:
    def use(model, optimizer, engine):
        for _ in range(3):
            optimizer.zero_grad()
            with engine.accumulate() if engine else nullcontext():
                backward(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)  # whole gradients can be read
            backward(model)
            optimizer.step()
        optimizer.zero_grad()
        backward(model)  # compressed at once again
        if engine:
            held = [optimizer.resident(p).held for p in model.parameters()]
            assert all(isinstance(each, SparseGradient) for each in held)
        optimizer.step()
        optimizer.zero_grad()

    alike(use, made, budget="300%")


def check_a_write_that_fails(number: int, passes: int, budget: str) -> None:
    """A step that a drive fails is repeated."""
    found = []
    for fails in (False, True):
        with drives(2, 1200) as on:
            device = f"{CARDS}&cards=2&drive=unused"
            model, optimizer = made(device=device, drives=on.store)
            with nearstep.offload(model, optimizer, budget=budget) as engine:
                for step in range(3):
                    optimizer.zero_grad()
                    with engine.accumulate() if passes > 1 else nullcontext():
                        for _ in range(passes):
                            backward(model)
                        if fails and step == 1:
                            on.places[1].fault = fault = FailAt("write", number, errno.EIO)
                            with pytest.raises(StorageError):
                                optimizer.step()
                            assert fault.fired == 1
                        optimizer.step()
                found.append(state_of(model, optimizer))
    assert found[0] == found[1]


def test_a_step_of_accumulated_gradients_that_a_drive_fails_is_repeated() -> None:
    check_a_write_that_fails(3, passes=2, budget="150%")


@pytest.mark.parametrize("number", [0, 5])
def test_a_step_that_a_drive_fails_is_repeated_with_the_same_pairs(number: int) -> None:
    check_a_write_that_fails(number, passes=1, budget="100%")


def test_to_accumulate_where_backward_updates_is_refused() -> None:
    model, optimizer = made()
    early = nearstep.offload(model, optimizer, budget="100%", updates="in-backward")
    refused = pytest.raises(ArgumentError, match="updates must be 'at-step', not 'in-backward'")
    with early as engine, refused:
        engine.accumulate().__enter__()


def backward(model: nn.Module) -> None:
    dtype = next(model.parameters()).dtype
    model(torch.ones(2, WIDTH, device=COMPUTE, dtype=dtype)).square().sum().backward()


@pytest.mark.parametrize("feedback", [True, False])
def test_parameters_of_16_bits(feedback: bool) -> None:
    def use(model, optimizer, _):
        for _ in range(3):
            optimizer.zero_grad()
            backward(model)
            optimizer.step()
        optimizer.zero_grad()

    make = partial(made, dtype=torch.bfloat16, error_feedback=feedback)
    alike(use, make, budget="100%")


def test_a_gradient_is_gone_when_backward_has_compressed_it() -> None:
    model, optimizer = made()
    with nearstep.offload(model, optimizer, budget="100%") as engine:
        backward(model)
        if COMPUTE.type != "cpu":
            torch.accelerator.synchronize()
            engine._space.land_all()
            engine._space.reap()
        assert engine._space.ledger.gradients == 0
        assert engine.report().gradients == 6
        helds = [optimizer.resident(p).held for p in model.parameters()]
        assert all(isinstance(each, SparseGradient) for each in helds)
        raws = [copy.raw_gradient() for copy in engine._space.copies]
        assert raws == [None] * 6
        optimizer.zero_grad()
        assert [p.grad for p in model.parameters()] == [None] * 6
        before = bits(model.state_dict())
        optimizer.step()
        assert bits(model.state_dict()) == before


def test_what_needs_a_whole_gradient_is_refused_and_changes_nothing() -> None:
    model, optimizer = made()
    with nearstep.offload(model, optimizer, budget="150%") as engine:
        backward(model)
        optimizer.step()
        optimizer.zero_grad()
        backward(model)
        before = state_of(model, optimizer)
        with pytest.raises(GradientError, match=r"2\.bias must be left unread"):
            print(model[2].bias.grad)
        with pytest.raises(GradientError, match=r"before another backward"):
            backward(model)
        if COMPUTE.type == "cpu":
            with pytest.raises(UnsupportedOptionError, match=r"^compression=0\.1"):
                engine.record("axdimm").__enter__()
        residual = optimizer.state[model[0].weight]["residual"]
        optimizer.state[model[0].weight]["residual"] = residual.clone()
        with pytest.raises(GradientError, match="compressed with the residual that the state has"):
            optimizer.step()
        optimizer.state[model[0].weight]["residual"] = residual
        assert state_of(model, optimizer) == before
        optimizer.step()
        after = state_of(model, optimizer)
        with pytest.raises(GradientError, match=r"reset \(zero_grad\) after the step"):
            optimizer.step()
        assert state_of(model, optimizer) == after != before
    plain, reference = made()
    for _ in range(2):
        reference.zero_grad()
        backward(plain)
        reference.step()
    assert state_of(plain, reference) == after


def test_a_closed_engine_leaves_the_next_step_what_it_is_to_send() -> None:
    found = []
    for offloads in (False, True):
        model, optimizer = made(max_grad_norm=1e-3)
        engine = nearstep.offload(model, optimizer, budget="100%") if offloads else nullcontext()
        with engine:
            backward(model)
        optimizer.step()
        optimizer.zero_grad()
        found.append(state_of(model, optimizer))
        backward(model)
        optimizer.step()
        found.append(state_of(model, optimizer))
    assert found[:2] == found[2:]
    assert found[0] != found[1]


def test_a_gradient_beside_a_compressed_one_is_refused() -> None:
    model, optimizer = made()
    with nearstep.offload(model, optimizer, budget="100%"):
        backward(model)
    backward(model)
    before = bits(model.state_dict())
    with pytest.raises(GradientError, match="one alone, since one was compressed, not two"):
        optimizer.step()
    assert bits(model.state_dict()) == before
    optimizer.zero_grad()
    backward(model)
    optimizer.step()
    assert bits(model.state_dict()) != before


def test_workers_are_refused(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        model = nn.Linear(WIDTH, WIDTH)
        optimizer = nearstep.optim.AdamW(model.parameters(), device=CARD, compression=0.1)
        with pytest.raises(UnsupportedOptionError, match=r"^compression=0\.1"):
            nearstep.offload(DistributedDataParallel(model), optimizer, budget="300%")
    finally:
        dist.destroy_process_group()


@pytest.mark.deep
def test_many_random_trainings() -> None:
    draw = random.Random(SEED)
    kinds = [kind for kind in KINDS if computes(kind)]
    for turn in range(30):
        options = {
            "compression": draw.choice([0.01, 0.1, 0.5, 1.0]),
            "compression_format": draw.choice(["fp32", "fp16", "bf16"]),
            "error_feedback": draw.random() < 0.5,
        }
        cards = draw.choice([0, 0, 1, 3])
        plan = Plan(
            kind=draw.choice(kinds),
            optimizer=draw.choice(list(OPTIMIZERS)),
            steps=draw.choice([2, 4]),
            evaluates=draw.random() < 0.5,
            schedules=draw.random() < 0.5,
            seed=SEED + turn,
        )
        offload: dict[str, Any] = {"policy": draw.choice(["prefetch", "on-demand", "memferry"])}
        if not cards and draw.random() < 0.5:
            offload["updates"] = "in-backward"
        print(f"seed {plan.seed}: {plan} {options} {cards} {offload}")
        assert_equal(plan, options, cards, **offload)
