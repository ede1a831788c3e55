"""Ctrl-C at any bytecode of a step, or an iteration, with drives: it was made, or it was not."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

import nearstep
from nearstep.torch import in_backward
from nearstep.torch.errors import InterruptedStepError

from ...interrupts import PACKAGE, Interrupts
from .jobs import EARLY, HOMES, Drives, Job, drives, everything, iteration, stack

JOB = Job([(40, 16), (16,), (30, 20)])
MODES: dict[str, tuple[Job, dict[str, Any]]] = {
    "at-step": (JOB, {}),
    "in-backward": (replace(JOB, early=True), EARLY),
}
KEPT = {
    "cache.py:ParameterCache.release": 23,
    "cache.py:ParameterCache.using": 12,
    "compute_copy.py:ComputeCopy": 18,
    "gradients.py:Gradients": 14,
    "ledger.py:": 17,
    "parameter.py:plainly": 18,
}
"""Functions of the engine that keep its books, each with a seed."""

COMMIT = 1_500
"""Bytecodes at the end of a step, in which its commit ends."""


@cache
def expected(kind: str) -> list[dict[str, bytes]]:
    """After each step, without drives."""
    parameters, optimizer = JOB.trained(HOMES[kind][1])
    found = [everything(parameters, optimizer)]
    for step in range(4):
        JOB.step(optimizer, parameters, step)
        found.append(everything(parameters, optimizer))
    return found


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Backward updates each parameter by itself."""
    monkeypatch.setattr(in_backward, "TOGETHER", 1)


def begun(kind: str, on: Drives, **more: Any) -> tuple[list[Any], Any]:
    url, _, options = HOMES[kind]
    return JOB.trained(url, drives=on.store, **options, **more)


def interrupted(kind: str, at: int, within: str, mode: str) -> str | None:
    """The second step is interrupted at a bytecode of these files; where."""
    job, more = MODES[mode]
    with drives() as on:
        parameters, optimizer = begun(kind, on, **more)
        job.step(optimizer, parameters, 0)
        interrupts = Interrupts(at, within)
        try:
            with interrupts.armed():
                job.step(optimizer, parameters, 1)
        except KeyboardInterrupt:
            pass
        where = interrupts.where
        images = [bytes(each.image) for each in on.places]
        try:
            if job.early:
                optimizer.zero_grad()  # rolls back
            made = expected(kind).index(everything(parameters, optimizer))
            job.go_on(parameters, optimizer, range(made, 4))
            assert everything(parameters, optimizer) == expected(kind)[4], where
            last = Drives([bytes(each.image) for each in on.places])
            assert everything(*begun(kind, last, resume=True)) == expected(kind)[4], where
            last.store.close()
        except InterruptedStepError:  # the device was in the middle of an update
            assert kind == "host", where
    other = Drives(images)
    parameters, optimizer = begun(kind, other, resume=True)
    made = expected(kind).index(everything(parameters, optimizer))
    assert made in (1, 2), where
    JOB.go_on(parameters, optimizer, range(made, 4))
    assert everything(parameters, optimizer) == expected(kind)[4], where
    other.store.close()
    return where


def campaign(
    kind: str, count: int, seed: int, within: str = PACKAGE, mode: str = "at-step"
) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    job, more = MODES[mode]
    with drives() as on:
        parameters, optimizer = begun(kind, on, **more)
        job.step(optimizer, parameters, 0)
        interrupts = Interrupts(within=within)
        with interrupts.armed():
            job.step(optimizer, parameters, 1)
    places = [rng.randrange(1, interrupts.count) for _ in range(count)]
    if within == PACKAGE:
        places += [interrupts.count - rng.randrange(COMMIT) for _ in range(count)]
    found = [interrupted(kind, at, within, mode) for at in places]
    assert sum(where is not None for where in found) >= count / 2  # a step takes no fixed course


@pytest.mark.parametrize("kind", HOMES)
def test_a_step_that_is_interrupted_was_made_or_not(kind: str) -> None:
    campaign(kind, 4, seed=3)


@pytest.mark.parametrize("kind", ["host", "processor"])
def test_a_backward_that_is_interrupted_was_made_or_not(kind: str) -> None:
    campaign(kind, 4, seed=4, mode="in-backward")


@cache
def after(kind: str) -> list[dict[str, bytes]]:
    """After each iteration of a model, without drives and without an engine."""
    model, optimizer = stack(HOMES[kind][1])
    found = [everything([*model.parameters()], optimizer)]
    for number in range(3):
        iteration(model, optimizer, number)
        found.append(everything([*model.parameters()], optimizer))
    return found


def offloaded(
    kind: str, at: int, within: str = PACKAGE, updates: str = "in-backward"
) -> Interrupts:
    """The second iteration of an offloaded model is interrupted at a bytecode."""
    with drives() as on:
        url, more = HOMES[kind][0], {"memory": 17_000}
        model, optimizer = stack(url, drives=on.store, **more)
        engine = nearstep.offload(model, optimizer, budget=8_000, updates=updates)  # type: ignore[arg-type]
        iteration(model, optimizer, 0)
        interrupts = Interrupts(at, within)
        try:
            with interrupts.armed():
                iteration(model, optimizer, 1)
        except KeyboardInterrupt:
            pass
        images = [bytes(each.image) for each in on.places]
        try:
            optimizer.zero_grad()
            made = after(kind).index(everything([*model.parameters()], optimizer))
            for number in range(made, 3):
                iteration(model, optimizer, number)
            assert everything([*model.parameters()], optimizer) == after(kind)[3], interrupts.where
            space, ledger = engine._space, engine._space.ledger
            charged = ledger.parameters, ledger.gradients
            space.mend()
            assert charged == (ledger.parameters, ledger.gradients), interrupts.where
            assert ledger.peak <= engine.budget
        except InterruptedStepError:  # the device was in the middle of an update
            assert kind == "host", interrupts.where
    other = Drives(images)
    model, optimizer = stack(url, drives=other.store, resume=True, **more)
    assert everything([*model.parameters()], optimizer) in after(kind)[1:3], interrupts.where
    other.store.close()
    return interrupts


def offloaded_campaign(kind: str, count: int, seed: int, *how: str) -> None:
    print(f"seed {seed}")
    rng, whole = random.Random(seed), offloaded(kind, 1 << 40, *how).count
    found = [offloaded(kind, rng.randrange(whole), *how).where for _ in range(count)]
    assert sum(where is not None for where in found) >= count / 2


@pytest.mark.parametrize("kind", ["host", "processor"])
def test_an_offloaded_backward_that_is_interrupted_was_made_or_not(kind: str) -> None:
    offloaded_campaign(kind, 3, seed=8)


@pytest.mark.parametrize(("function", "seed"), KEPT.items())
def test_an_engine_that_is_interrupted_is_usable(function: str, seed: int) -> None:
    offloaded_campaign("processor", 3, seed, f"/torch/offload/{function}")


@pytest.mark.deep
@pytest.mark.parametrize("updates", ["at-step", "in-backward"])
@pytest.mark.parametrize("function", KEPT)
def test_an_engine_that_is_interrupted_anywhere_is_usable(function: str, updates: str) -> None:
    offloaded_campaign("processor", 40, 11, f"/torch/offload/{function}", updates)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["host", "processor"])
def test_an_offloaded_backward_that_is_interrupted_anywhere_was_made_or_not(kind: str) -> None:
    offloaded_campaign(kind, 40, seed=9)


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["host", "processor"])
@pytest.mark.parametrize("seed", range(3))
def test_a_backward_that_is_interrupted_anywhere_was_made_or_not(kind: str, seed: int) -> None:
    campaign(kind, 40, seed=200 + seed, mode="in-backward")


@pytest.mark.parametrize("file", ["updater/accelerated.py", "torch/execution.py"])
@pytest.mark.parametrize("kind", HOMES)
def test_a_step_that_is_interrupted_while_runs_begin_was_made_or_not(kind: str, file: str) -> None:
    campaign(kind, 2, seed=5, within=f"/{file}")


@pytest.mark.deep
@pytest.mark.parametrize("file", ["updater/accelerated.py", "torch/execution.py"])
@pytest.mark.parametrize("kind", HOMES)
def test_a_step_that_is_interrupted_wherever_runs_begin_was_made_or_not(
    kind: str, file: str
) -> None:
    campaign(kind, 60, seed=6, within=f"/{file}")


@pytest.mark.deep
@pytest.mark.parametrize("kind", HOMES)
@pytest.mark.parametrize("seed", range(2))
def test_a_step_that_is_interrupted_anywhere_was_made_or_not(kind: str, seed: int) -> None:
    campaign(kind, 40, seed=100 + seed)
