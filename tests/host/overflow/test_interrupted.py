"""Ctrl-C at any bytecode of a step with drives: the step was made, or it was not."""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest

from nearstep.torch.errors import InterruptedStepError

from ...interrupts import PACKAGE, Interrupts
from .jobs import HOMES, Drives, Job, drives, everything

JOB = Job([(40, 16), (16,), (30, 20)])
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


def begun(kind: str, on: Drives, **more: Any) -> tuple[list[Any], Any]:
    url, _, options = HOMES[kind]
    return JOB.trained(url, drives=on.store, **options, **more)


def interrupted(kind: str, at: int, within: str) -> str | None:
    """The second step is interrupted at a bytecode of these files; where."""
    with drives() as on:
        parameters, optimizer = begun(kind, on)
        JOB.step(optimizer, parameters, 0)
        interrupts = Interrupts(at, within)
        try:
            with interrupts.armed():
                JOB.step(optimizer, parameters, 1)
        except KeyboardInterrupt:
            pass
        where = interrupts.where
        images = [bytes(each.image) for each in on.places]
        try:
            made = expected(kind).index(everything(parameters, optimizer))
            JOB.go_on(parameters, optimizer, range(made, 4))
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


def campaign(kind: str, count: int, seed: int, within: str = PACKAGE) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    with drives() as on:
        parameters, optimizer = begun(kind, on)
        JOB.step(optimizer, parameters, 0)
        interrupts = Interrupts(within=within)
        with interrupts.armed():
            JOB.step(optimizer, parameters, 1)
    places = [rng.randrange(1, interrupts.count) for _ in range(count)]
    if within == PACKAGE:
        places += [interrupts.count - rng.randrange(COMMIT) for _ in range(count)]
    found = [interrupted(kind, at, within) for at in places]
    assert sum(where is not None for where in found) >= count / 2  # a step takes no fixed course


@pytest.mark.parametrize("kind", HOMES)
def test_a_step_that_is_interrupted_was_made_or_not(kind: str) -> None:
    campaign(kind, 4, seed=3)


@pytest.mark.parametrize("file", ["updater/accelerated.py", "torch/execution.py"])
@pytest.mark.parametrize("kind", HOMES)
def test_a_step_that_is_interrupted_while_runs_begin_was_made_or_not(kind: str, file: str) -> None:
    campaign(kind, 2, seed=5, within=PACKAGE + file)


@pytest.mark.deep
@pytest.mark.parametrize("file", ["updater/accelerated.py", "torch/execution.py"])
@pytest.mark.parametrize("kind", HOMES)
def test_a_step_that_is_interrupted_wherever_runs_begin_was_made_or_not(
    kind: str, file: str
) -> None:
    campaign(kind, 60, seed=6, within=PACKAGE + file)


@pytest.mark.deep
@pytest.mark.parametrize("kind", HOMES)
@pytest.mark.parametrize("seed", range(4))
def test_a_step_that_is_interrupted_anywhere_was_made_or_not(kind: str, seed: int) -> None:
    campaign(kind, 40, seed=100 + seed)
