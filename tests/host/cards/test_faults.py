"""Cards and their drives that fail: everything is as before the step, which can be made again."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch

from nearstep.backends.emulated import Injection
from nearstep.errors import DeviceError, ResetNeededError
from nearstep.storage.drive_errors import StorageError, UncertainCommitError
from nearstep.torch.errors import InterruptedStepError
from nearstep_sim.models.drive import FailAt

from ..overflow.jobs import Drives, Job, drives, everything
from .test_equality import PLAIN, card_url

JOB = Job([(40, 16), (16,), (30, 20)])
URL = card_url(2, 128)


def touch(optimizer: Any, parameters: Any) -> None:
    """Change a moment and a parameter on the host, which the next step takes over."""
    optimizer.state[parameters[1]]["exp_avg"].add_(0.5)
    with torch.no_grad():
        parameters[0][3:7].mul_(1.5)


@cache
def expected_after(steps: int, *, touched: bool = False) -> dict[str, bytes]:
    """Without drives; with changes after the first step."""
    parameters = JOB.parameters()
    optimizer = JOB.make(parameters, PLAIN)
    for step in range(steps):
        JOB.step(optimizer, parameters, step)
        if touched and step == 0:
            touch(optimizer, parameters)
    return everything(parameters, optimizer)


@contextmanager
def prepared(*, touched: bool = True) -> Iterator[tuple[Drives, list[Any], Any]]:
    """Drives, parameters and an optimizer that has made a step."""
    with drives() as on:
        parameters = JOB.parameters()
        optimizer = JOB.make(parameters, URL, drives=on.store)
        JOB.step(optimizer, parameters, 0)
        if touched:
            touch(optimizer, parameters)
        yield on, parameters, optimizer


def actions_of_a_step(action: str) -> list[int]:
    """How many of an action the second step has, on each drive."""
    found = [0, 0]

    def count(drive: int) -> Callable[[str, int], None]:
        def seen(what: str, block: int) -> None:
            found[drive] += what == action

        return seen

    with prepared() as (on, parameters, optimizer):
        for index, place in enumerate(on.places):
            place.fault = count(index)
        JOB.step(optimizer, parameters, 1)
    found[0] -= action == "write"  # the second copy of the superblock may fail
    return found


def check_fault(action: str, drive: int, number: int, code: int) -> bool:
    """One fails in the second step; whether the step could be made again."""
    with prepared() as (on, parameters, optimizer):
        before = [bytes(p.detach().numpy().tobytes()) for p in parameters]
        on.places[drive].fault = fault = FailAt(action, number, code)
        with pytest.raises(StorageError) as caught:
            JOB.step(optimizer, parameters, 1)
        assert fault.fired == 1
        if isinstance(caught.value, UncertainCommitError):
            with pytest.raises(InterruptedStepError, match="UncertainCommitError"):
                optimizer.state_dict()
            on.store.close()
            again = Drives([bytes(each.image) for each in on.places])
            resumed = JOB.parameters()
            optimizer = JOB.make(resumed, URL, drives=again.store, resume=True)
            assert everything(resumed, optimizer) in (
                expected_after(1),
                expected_after(1, touched=True),
                expected_after(2, touched=True),
            )
            again.store.close()
            return False
        assert [bytes(p.detach().numpy().tobytes()) for p in parameters] == before
        assert everything(parameters, optimizer) == expected_after(1, touched=True)
        assert optimizer.traffic.steps == 1
        JOB.step(optimizer, parameters, 1)
        JOB.step(optimizer, parameters, 2)
        assert everything(parameters, optimizer) == expected_after(3, touched=True)
        return True


@pytest.mark.parametrize("action", ["read", "write", "flush"])
def test_after_an_error_of_a_drive_everything_is_as_before_the_step(action: str) -> None:
    counts = actions_of_a_step(action)
    assert min(counts) > 0
    places = [(0, counts[0] // 2), (0, counts[0] - 1), (1, counts[1] // 2)]
    whole = [check_fault(action, drive, number, errno.EIO) for drive, number in places]
    assert (whole.count(False) > 0) == (action != "read")  # the superblock, and the flush after it
    assert whole.count(True) >= 1


@pytest.mark.deep
@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV])
@pytest.mark.parametrize("action", ["read", "write", "flush"])
def test_every_read_write_and_flush_of_a_step(action: str, code: int) -> None:
    counts = actions_of_a_step(action)
    whole = [
        check_fault(action, drive, number, code)
        for drive, count in enumerate(counts)
        for number in range(count)
    ]
    assert len(whole) == sum(counts) > 2
    commits = 2  # what was changed on the host, and the step
    assert whole.count(False) == (0 if action == "read" else commits)


@pytest.mark.parametrize("array", ["p"])
@pytest.mark.parametrize("write", [False, True])
def test_a_card_that_fails_in_mid_step(array: str, write: bool) -> None:
    """The error names it; once the device is reset the step can be made again."""
    with prepared() as (_, parameters, optimizer):
        device = optimizer.device
        seen: list[int] = []
        update = device.update

        def spy(rule: Any, arrays: Any, **options: Any) -> Any:
            if arrays[array].address >= device.backend.regions[1][0]:
                seen.append(arrays[array].address)
                if len(seen) == 3:
                    hit = seen[-1]
                    device.backend.inject(
                        Injection(kind="slverr", write=write, base=hit, limit=hit + 64)
                    )
            return update(rule, arrays, **options)

        device.update = spy
        with pytest.raises(DeviceError) as caught:
            JOB.step(optimizer, parameters, 1)
        del device.update
        device.backend.heal()
        said = f"{caught.value} {getattr(caught.value, '__notes__', '')}"
        assert "updater1" in said or "card 1 of 2" in said, said
        assert everything(parameters, optimizer) == expected_after(1, touched=True)
        try:
            JOB.step(optimizer, parameters, 1)
        except ResetNeededError:
            assert everything(parameters, optimizer) == expected_after(1, touched=True)
            device.reset()
            JOB.step(optimizer, parameters, 1)
        JOB.step(optimizer, parameters, 2)
        assert everything(parameters, optimizer) == expected_after(3, touched=True)


@pytest.mark.parametrize(
    "action", ["flush", *(pytest.param(each, marks=pytest.mark.deep) for each in ("read", "write"))]
)
def test_what_error_feedback_holds_back_is_as_before_the_step_too(action: str) -> None:
    plain = JOB.parameters()
    memory = JOB.make(plain, PLAIN, compression=0.1)
    with drives() as on:
        parameters = JOB.parameters()
        optimizer = JOB.make(parameters, URL, drives=on.store, compression=0.1)
        for step in range(3):
            for number in (0,) if action == "flush" else (0, 3):
                before = everything(parameters, optimizer)
                on.places[1].fault = fault = FailAt(action, number)
                with pytest.raises(StorageError):
                    JOB.step(optimizer, parameters, step)
                assert fault.fired == 1
                assert everything(parameters, optimizer) == before
            JOB.step(optimizer, parameters, step)
            JOB.step(memory, plain, step)
            assert everything(parameters, optimizer) == everything(plain, memory)
