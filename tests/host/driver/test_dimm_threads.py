"""The channels of a simulated DIMM go through time in threads: nothing of it can be seen."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.errors import ArgumentError, WaitTimeoutError
from nearstep.threads import VARIABLE
from nearstep.updater.turns import Turns

from .conftest import DIMMS
from .dimm_scenarios import MANY, NEVER, SCENARIOS, Log, jobs, run_all, seen

FAST = ("transfers", "faults of both")
"""Of the device that takes longest."""


def observed(url: str, threads: str, scenario: str, monkeypatch: pytest.MonkeyPatch) -> Log:
    """All that can be seen of a scenario."""
    monkeypatch.setenv(VARIABLE, threads)
    with nearstep.open(url) as dimm:
        assert isinstance(dimm, AxdimmDevice)
        before = len(os.listdir("/proc/self/task"))
        log = seen(dimm, scenario)
        begun = len(os.listdir("/proc/self/task")) - before
        assert begun == min(int(threads), 2) - 1  # no more than there are channels
        return log


CASES = [("sim-dimm", scenario) for scenario in SCENARIOS] + [
    pytest.param("sim-dimm-stalled", scenario, marks=() if scenario in FAST else pytest.mark.deep)
    for scenario in SCENARIOS
]


@pytest.mark.parametrize(("device", "scenario"), CASES)
def test_bits_and_cycles_do_not_depend_on_the_number_of_threads(device, scenario, monkeypatch):
    one, two = (observed(DIMMS[device], each, scenario, monkeypatch) for each in ("1", "2"))
    print(scenario, "observations", len(one))
    assert len(one) >= 6
    assert one == two


def test_more_threads_than_channels_are_not_begun(monkeypatch):
    one, many = (observed(DIMMS["sim-dimm"], each, "waits", monkeypatch) for each in ("1", "9"))
    assert len(one) >= 6
    assert one == many


def test_ctrl_c_while_both_channels_run_leaves_them_usable(monkeypatch):
    monkeypatch.setenv(VARIABLE, "2")
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        with nearstep.open(DIMMS["sim-dimm"]) as dimm:
            works = jobs(dimm)
            begun = dimm.cycles
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(KeyboardInterrupt):
                dimm.backend.wait([NEVER], 10**12)
            assert dimm.cycles > begun
            with dimm.acceleration():
                run_all(works)
            assert [w.check() for w in works] == [3 * MANY] * 2
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_number_of_threads_that_cannot_be_is_an_error(monkeypatch):
    monkeypatch.setenv(VARIABLE, "0")
    with pytest.raises(ArgumentError, match="NEARSTEP_THREADS must be a whole number"):
        nearstep.open(DIMMS["sim-dimm"])


def test_idle_threads_use_no_processor(monkeypatch):
    monkeypatch.setenv(VARIABLE, "2")
    tasks = set(os.listdir("/proc/self/task"))
    with nearstep.open(DIMMS["sim-dimm"]) as dimm:
        with pytest.raises(WaitTimeoutError):
            dimm.backend.wait([NEVER], 2000)
        (own,) = set(os.listdir("/proc/self/task")) - tasks

        def state() -> str:
            with open(f"/proc/self/task/{own}/stat") as file:
                return file.read().rpartition(")")[2].split()[0]

        deadline = time.monotonic() + 30
        while state() != "S" and time.monotonic() < deadline:
            time.sleep(0.001)
        assert state() == "S"
    assert own not in os.listdir("/proc/self/task")


def test_a_copy_whose_end_was_interrupted_keeps_no_thread_from_its_own_channel() -> None:
    turns = Turns(lambda: 0)
    turns.begin_copy(object(), 0, lambda: "write")  # and Ctrl-C before end_copy
    with turns.region([0], "run") as region:
        assert turns.holds(region, 0)


class Interrupted(dict[Any, Any]):
    """Raises after a change, as Ctrl-C behind the call which made it."""

    def __ior__(self, other: Any) -> Any:
        self.update(other)
        raise KeyboardInterrupt

    def __setitem__(self, key: object, value: object) -> None:
        super().__setitem__(key, value)
        raise KeyboardInterrupt


def test_an_interrupted_copy_or_region_keeps_no_channel_from_another_thread() -> None:
    with nearstep.open(DIMMS["golden-dimm"]) as dimm:
        buffer, turns, done = dimm.alloc(64, np.float32, channel=0), dimm._turns, []

        def use() -> None:
            buffer.write(np.ones(64, np.float32))
            with dimm.acceleration(0):
                done.append(turns.holds(turns._regions[0], 0))

        def left_in_part() -> None:
            with dimm.acceleration(0):
                region = turns._regions[0]
            turns._regions[0] = region  # Ctrl-C in the wait for the lock

        for name, interrupted in (
            ("_copies", use),
            ("_regions", use),
            ("", left_in_part),
        ):
            with contextlib.suppress(KeyboardInterrupt):
                if name:
                    setattr(turns, name, Interrupted())
                interrupted()
            if name:
                setattr(turns, name, dict(getattr(turns, name)))
            other = threading.Thread(target=use, daemon=True)
            other.start()
            other.join(20)
            assert not other.is_alive(), name
    assert done == [True] * 3
