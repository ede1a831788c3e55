"""An offloaded model whose state is on drives, of which any action of an iteration fails."""

from __future__ import annotations

import errno
import warnings
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import nearstep
from nearstep.storage.drive_errors import (
    DamagedSuperblockWarning,
    StorageError,
    UncertainCommitError,
)
from nearstep.torch.errors import InterruptedStepError
from nearstep.torch.offload import Engine
from nearstep_sim.models.drive import FailAt

from .jobs import URL, Drives, drives, everything, iteration, stack

MEMORY = 17_000
BUDGET = 8_000
COMMITS = {"at-step": 2, "in-backward": 1}
"""Of an iteration: of the gradients, which the drives keep until the step, and of the step."""


def made(store: Any = None, **options: Any) -> tuple[nn.Sequential, Any]:
    return stack(URL, **({} if store is None else {"drives": store, "memory": MEMORY, **options}))


def expected_after(count: int) -> dict[str, bytes]:
    model, optimizer = made()
    for number in range(count):
        iteration(model, optimizer, number)
    return everything(list(model.parameters()), optimizer)


@cache
def actions(updates: Any) -> list[Counter[str]]:
    """How many of each the second iteration has, on each drive."""
    with drives() as on:
        model, optimizer = made(on.store)
        with nearstep.offload(model, optimizer, budget=BUDGET, updates=updates):
            iteration(model, optimizer, 0)
            found: list[Counter[str]] = [Counter(), Counter()]

            def count(drive: int) -> Callable[[str, int], None]:
                return lambda what, block: found[drive].update([what])

            for index, place in enumerate(on.places):
                place.fault = count(index)
            iteration(model, optimizer, 1)
            for place in on.places:
                place.fault = lambda action, block: None
        return found


def check(updates: Any, action: str, drive: int, number: int, code: int) -> bool | None:
    """One fails; whether the iteration could be made again.

    None: the iteration has been made, since its generation counts.
    """
    with drives() as on:
        model, optimizer = made(on.store)
        engine: Engine = nearstep.offload(model, optimizer, budget=BUDGET, updates=updates)
        iteration(model, optimizer, 0)
        on.places[drive].fault = fault = FailAt(action, number, code)
        caught: StorageError | None = None
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            try:
                iteration(model, optimizer, 1)
            except StorageError as error:
                caught = error
        assert fault.fired == 1
        if isinstance(caught, UncertainCommitError):
            with pytest.raises(InterruptedStepError):
                optimizer.step()
            on.store.close()
            again = Drives([bytes(each.image) for each in on.places])
            model, optimizer = made(again.store, resume=True)
            found = everything(list(model.parameters()), optimizer)
            assert found in (expected_after(1), expected_after(2))
            again.store.close()
            return False
        if caught is None:
            damaged = any(issubclass(each.category, DamagedSuperblockWarning) for each in told)
            assert damaged or action == "flush"  # then the drives are read: the generation counts
        else:
            iteration(model, optimizer, 1)
        iteration(model, optimizer, 2)
        assert engine.report().peak <= BUDGET
        engine.close()
        assert everything(list(model.parameters()), optimizer) == expected_after(3)
        return None if caught is None else True


@pytest.mark.parametrize(
    "action", ["write", *(pytest.param(name, marks=pytest.mark.deep) for name in ("read", "flush"))]
)
@pytest.mark.parametrize("updates", COMMITS)
def test_after_an_error_of_a_drive_the_iteration_can_be_made_again(
    updates: str, action: str
) -> None:
    counts = [each[action] for each in actions(updates)]
    assert min(counts) > 0
    numbers = {(drive, number) for drive, count in enumerate(counts) for number in {0, count // 2}}
    whole = [check(updates, action, *each, errno.EIO) for each in sorted(numbers)]
    assert whole.count(True) >= 1


@pytest.mark.deep
@pytest.mark.parametrize("updates", COMMITS)
@pytest.mark.parametrize("action", ["read", "write", "flush"])
def test_every_action_of_an_iteration(action: str, updates: str) -> None:
    counts = [each[action] for each in actions(updates)]
    whole = [
        check(updates, action, drive, number, errno.EIO)
        for drive, count in enumerate(counts)
        for number in range(count)
    ]
    assert len(whole) == sum(counts) > 2
    commits = COMMITS[updates]
    print(f"{action}: {len(whole)}, {whole.count(False)} uncertain, {whole.count(None)} copies")
    assert len(whole) - whole.count(True) == (0 if action == "read" else commits)


@pytest.mark.parametrize("updates", COMMITS)
def test_a_changed_parameter_is_not_lost_without_a_word(updates: Any) -> None:
    """It is on the drives, in no generation yet, when a gradient cannot be written."""

    def change(model: nn.Sequential) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(2.0)

    plain, plain_optimizer = made()
    iteration(plain, plain_optimizer, 0)
    change(plain)
    expected = [plain_bits.detach().clone() for plain_bits in plain.parameters()]
    refused = whole = 0
    for number in range(0, actions(updates)[0]["write"] + 8, 2 if updates == "at-step" else 6):
        with drives() as on:
            model, optimizer = made(on.store)
            engine = nearstep.offload(model, optimizer, budget=BUDGET, updates=updates)
            iteration(model, optimizer, 0)
            on.places[0].fault = FailAt("write", number, errno.EIO)
            has_changed = False
            try:
                change(model)
                has_changed = True
                iteration(model, optimizer, 1)
            except UncertainCommitError:
                continue
            except StorageError:
                if refuses(optimizer):
                    refused += 1
                    continue
                assert has_changed
                engine.close()
                for found, wanted in zip(model.parameters(), expected, strict=True):
                    assert torch.equal(found, wanted)
                whole += 1
    assert refused > 0
    assert whole > 0


def refuses(optimizer: Any) -> bool:
    """Whether steps are refused."""
    try:
        optimizer.state_dict()
    except InterruptedStepError:
        return True
    return False
