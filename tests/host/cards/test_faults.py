"""Cards and their drives that fail: everything is as before the step, which can be made again."""

from __future__ import annotations

import errno
from typing import Any

import pytest

from nearstep.backends.emulated import Injection
from nearstep.errors import DeviceError, ResetNeededError
from nearstep.storage.drive_errors import StorageError, UncertainCommitError
from nearstep_sim.models.drive import FailAt

from ..overflow.jobs import drives, everything
from ..overflow.test_faults import JOB, actions_of_a_step, check_fault, expected_after, prepared
from .test_equality import PLAIN, card_url

URL = card_url(2, 128)


@pytest.mark.parametrize("action", ["read", "write", "flush"])
def test_after_an_error_of_a_drive_everything_is_as_before_the_step(action: str) -> None:
    counts = actions_of_a_step(action, URL)
    assert min(counts) > 0
    places = [(0, counts[0] // 2), (0, counts[0] - 1), (1, counts[1] // 2)]
    errors = [check_fault(FailAt(action, number), drive, URL) for drive, number in places]
    assert (None in errors) == (action == "flush")  # the superblock was written
    assert len(errors) - errors.count(None) >= 2
    assert UncertainCommitError not in errors


@pytest.mark.deep
@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV])
@pytest.mark.parametrize("action", ["read", "write", "flush"])
def test_every_read_write_and_flush_of_a_step(action: str, code: int) -> None:
    counts = actions_of_a_step(action, URL)
    errors = [
        check_fault(FailAt(action, number, code), drive, URL)
        for drive, count in enumerate(counts)
        for number in range(count)
    ]
    assert len(errors) == sum(counts) > 2
    commits = 2  # what was changed on the host, and the step
    counted = {"read": 0, "write": commits - 1, "flush": commits}  # less the last second copy
    assert errors.count(None) == counted[action]


@pytest.mark.parametrize("action", ["read", "write", "flush"])
def test_a_drive_that_fails_from_then_on_is_asked_when_the_optimizer_is_used(action: str) -> None:
    count = actions_of_a_step(action, URL)[0]
    errors = [
        check_fault(FailAt(action, number, lasts=True), 0, URL)
        for number in (count // 2, count - 1)
    ]
    assert (UncertainCommitError in errors) == (action != "read")


@pytest.mark.parametrize("array", ["p"])
@pytest.mark.parametrize("write", [False, True])
def test_a_card_that_fails_in_mid_step(array: str, write: bool) -> None:
    """The error names it; once the device is reset the step can be made again."""
    with prepared(URL) as (_, parameters, optimizer):
        device = optimizer.device
        seen: list[int] = []
        update = device.run_rule

        def spy(rule: Any, arrays: Any, **options: Any) -> Any:
            if arrays[array].address >= device.backend.regions[1][0]:
                seen.append(arrays[array].address)
                if len(seen) == 3:
                    hit = seen[-1]
                    device.backend.inject(
                        Injection(kind="slverr", write=write, base=hit, limit=hit + 64)
                    )
            return update(rule, arrays, **options)

        device.run_rule = spy
        with pytest.raises(DeviceError) as caught:
            JOB.step(optimizer, parameters, 1)
        del device.run_rule
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
