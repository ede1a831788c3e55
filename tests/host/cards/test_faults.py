"""Cards that fail: everything is as before the step, which can be made again.

Their drives are rows of `tests/host/overflow/test_faults.py`.
"""

from __future__ import annotations

from typing import Any

import pytest

from nearstep.backends.emulated import Injection
from nearstep.errors import DeviceError, ResetNeededError
from nearstep.storage.drive_errors import StorageError
from nearstep_sim.models.drive import FailAt

from ..overflow.jobs import PLAIN, card_url, drives, everything
from ..overflow.test_faults import JOB, expected_after, prepared

URL = card_url(2, 128)


@pytest.mark.parametrize("write", [False, True])
def test_a_card_that_fails_in_mid_step(write: bool) -> None:
    """The error names it; once the device is reset the step can be made again."""
    with prepared(URL) as (_, parameters, optimizer):
        device = optimizer.device
        seen: list[int] = []
        update = device.run_rule

        def spy(rule: Any, arrays: Any, **options: Any) -> Any:
            if arrays["p"].address >= device.backend.regions[1][0]:
                seen.append(arrays["p"].address)
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
    plain, memory = JOB.trained(PLAIN, compression=0.1)
    with drives() as on:
        parameters, optimizer = JOB.trained(URL, drives=on.store, compression=0.1)
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
