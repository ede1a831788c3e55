"""Training with state on drives has the bits that it has without."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import nearstep
from nearstep.torch.errors import UnsupportedOptionError
from nearstep.torch.homes.errors import MemoryTooSmallError

from .jobs import BF16, DIMM, OPTIMIZERS, URL, Job, bits, drives, everything, random_job

STEPS = 3


def smallest(job: Job, url: str) -> int:
    """The memory that is named where there is too little."""
    with drives() as on, pytest.raises(MemoryTooSmallError) as caught:
        job.make(job.parameters(), url, drives=on.store, memory=1)
    assert caught.value.actual == 1
    assert f"at least {caught.value.expected} bytes, not 1" in str(caught.value)
    return caught.value.expected


def compare(job: Job, url: str, memory: int, eviction: str, count: int) -> int:
    """Train with drives and without; values that were compared."""
    plain = job.parameters()
    expected = job.make(plain, url)
    with drives(count) as on:
        own = job.parameters()
        found = job.make(own, url, drives=on.store, memory=memory, eviction=eviction)
        compared = 0
        for step in range(STEPS):
            job.step(expected, plain, step)
            job.step(found, own, step)
            here, there = everything(own, found), everything(plain, expected)
            assert here == there, (job, memory, eviction, step)
            compared += len(here)
        assert 0 < found.memory_peak <= memory
        assert on.store.generation == STEPS + 1
        return compared


@pytest.mark.parametrize("eviction", ["updated_first", "belady"])
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_every_optimizer_and_policy_under_the_smallest_memory(
    optimizer: str, eviction: str
) -> None:
    job = Job([(40, 16), (16,), (30, 20), (7,), (1,)], optimizer, skips=4)
    least = smallest(job, URL)
    if OPTIMIZERS[optimizer][1].get("amsgrad"):
        assert least == 5 * 4 * 640
    assert compare(job, URL, least, eviction, 2) >= STEPS * 6
    with drives() as on, pytest.raises(MemoryTooSmallError, match=str(least)):
        job.make(job.parameters(), URL, drives=on.store, memory=least - 1)


@pytest.mark.parametrize("url", [URL, DIMM])
def test_large_parameters_that_the_device_updates_in_place(url: str) -> None:
    job = Job([(160, 128), (128, 130), (64, 300)])
    least = smallest(job, url)
    assert least >= 16 * 160 * 128
    assert compare(job, url, least, "updated_first", 2) > 20


@pytest.mark.parametrize("url", [URL, BF16])
def test_masters_of_16_bit_parameters_move_with_their_state(url: str) -> None:
    job = Job([(40, 16), (16,), (30, 20), (7,), (9,)], dtype=torch.bfloat16, skips=3)
    assert compare(job, url, smallest(job, url), "updated_first", 1) > 20


def rounds(first: int, count: int) -> int:
    compared = 0
    for seed in range(first, first + count):
        print(f"seed {seed}")
        choose = np.random.default_rng(seed)
        job = random_job(choose, str(choose.choice(list(OPTIMIZERS))), seed=seed)
        url = str(choose.choice([URL, DIMM]))
        least = smallest(job, url)
        memory = least if choose.random() < 0.3 else int(least * choose.uniform(1, 6))
        eviction = str(choose.choice(["updated_first", "belady"]))
        compared += compare(job, url, memory, eviction, int(choose.integers(1, 4)))
    return compared


def test_random_models_and_memories() -> None:
    assert rounds(300, 8) > 100


@pytest.mark.deep
def test_many_random_models_and_memories() -> None:
    assert rounds(1000, 150) > 3000


def test_parameters_and_state_changed_on_the_host_between_steps() -> None:
    job = Job([(40, 16), (16,), (30, 20)])
    compared = 0
    with drives() as on:
        plain, own = job.parameters(), job.parameters()
        expected = job.make(plain, URL)
        found = job.make(own, URL, drives=on.store, memory=smallest(job, URL))
        for step in range(4):
            for parameters, optimizer in ((plain, expected), (own, found)):
                job.step(optimizer, parameters, step)
                with torch.no_grad():
                    parameters[step % 3].mul_(0.5)
                    optimizer.state[parameters[0]]["exp_avg"].add_(0.25)
                optimizer.state[parameters[2]]["exp_avg_sq"] = torch.ones(30, 20)
                if step == 1:
                    optimizer.param_groups[0]["lr"] = 0.5
            here, there = everything(own, found), everything(plain, expected)
            assert here == there
            compared += len(here)
    assert compared > 30


def test_a_parameter_that_is_added_later_and_one_that_is_thawed() -> None:
    job = Job([(40, 16), (16,), (30, 20)])
    results = []
    for overflows in (False, True):
        with drives() as on:
            more = {"drives": on.store, "memory": 64 << 10} if overflows else {}
            parameters = job.parameters()
            parameters[1].requires_grad_(False)
            optimizer = nearstep.optim.AdamW(parameters[:2], device=URL, **more)
            parameters[0].grad = torch.ones(40, 16)
            optimizer.step()
            parameters[1].requires_grad_(True)
            optimizer.add_param_group({"params": parameters[2:], "lr": 0.5})
            for step in range(2):
                job.step(optimizer, parameters, step)
            results.append(everything(parameters, optimizer))
    assert len(results[0]) > 10
    assert results[0] == results[1]


@pytest.mark.parametrize("kind", [torch.amp.GradScaler, nearstep.optim.GradScaler])
@pytest.mark.parametrize("more", ["", "&scan=yes&gradient_scale=yes"])
def test_loss_scaling_and_a_step_that_is_skipped(kind: type, more: str) -> None:
    job = Job([(40, 16), (16,), (30, 20)])
    results = []
    for overflows in (False, True):
        with drives() as on:
            parameters = job.parameters()
            least = {"drives": on.store, "memory": smallest(job, URL)} if overflows else {}
            optimizer = job.make(parameters, URL + more, **least)
            scaler = kind("cpu", init_scale=8.0)
            scaler.scale(torch.ones(()))
            for step in range(3):
                job.gradients(parameters, step)
                for p in parameters:
                    p.grad.mul_(8.0)
                if step == 1:
                    parameters[2].grad[3, 3] = torch.inf
                scaler.step(optimizer)
                scaler.update()
                scaler.update(8.0)
            assert (on.store.generation == 3) == overflows
            results.append(everything(parameters, optimizer))
    assert len(results[0]) > 10
    assert results[0] == results[1]


@pytest.mark.parametrize("overflows", [False, True])
def test_an_offloaded_model_on_top(overflows: bool) -> None:
    def model() -> nn.Module:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24), nn.Linear(24, 8))

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
        generator = torch.Generator().manual_seed(11)
        losses = []
        for _ in range(4):
            optimizer.zero_grad()
            for _ in range(2):
                loss = model(torch.randn(4, 24, generator=generator)).square().mean()
                loss.backward()
            losses.append(bits(loss))
            optimizer.step()
        return losses

    plain = model()
    expected = nearstep.optim.AdamW(plain.parameters(), device=URL)
    losses = train(plain, expected)
    own = model()
    with drives() as on:
        more = {"drives": on.store, "memory": 17_000} if overflows else {}
        found = nearstep.optim.AdamW(own.parameters(), device=URL, **more)
        with nearstep.offload(own, found, budget=8000) as engine:
            assert train(own, found) == losses
            assert engine.report().peak <= engine.budget
        assert type(own[0].weight) is nn.Parameter
        here = everything(list(own.parameters()), found)
        assert here == everything(list(plain.parameters()), expected)


def test_parameters_that_are_on_the_device_cannot_overflow(tmp_path: Path) -> None:
    with nearstep.offload.init("golden:axdimm") as init:
        model = torch.nn.Linear(64, 64)
    with pytest.raises(UnsupportedOptionError, match=r"nearstep\.offload\.init"):
        nearstep.optim.AdamW(
            model.parameters(), device=init.device, drives=[tmp_path / "a"], memory="1MiB"
        )
    assert torch.isfinite(model.weight).all()
