"""The channels of a simulated DIMM go through time in threads: nothing of it can be seen."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.backends.base import Poll
from nearstep.backends.emulated import Injection
from nearstep.errors import (
    AbortedError,
    ArgumentError,
    UninitialisedError,
    WaitTimeoutError,
)
from nearstep.threads import VARIABLE
from nearstep_spec.updater.registers import ARRAYS

from .conftest import BLOCK, DIMMS
from .job import Job

MANY = 40 * BLOCK + 5
SIMULATED = ("sim-dimm", "sim-dimm-stalled")
NEVER = Poll(address=0, mask=1, value=2)

Log = list[object]


def jobs(dimm: AxdimmDevice, count: int = MANY) -> list[Job]:
    return [Job(dimm, count, 20 + channel, channel=channel) for channel in range(2)]


def digest(data: Any) -> str:
    return hashlib.sha256(np.ascontiguousarray(data)).hexdigest()


def contents(work: Job) -> list[str]:
    work.take_back()
    return [digest(work.buffers[name].read()) for name in ARRAYS]


def run_all(works: list[Job]) -> None:
    for run in [work.start() for work in works]:
        run.wait()


def steps(dimm: AxdimmDevice) -> Log:
    """Both kernels at once, of different lengths, several times."""
    log: Log = []
    for count in (1001, MANY, 517):
        works = [Job(dimm, count, 3), Job(dimm, MANY - 700, 4, channel=1)]
        with dimm.acceleration():
            for run in reversed([work.start() for work in works]):
                run.wait()
                log.append(dimm.cycles)
        assert [w.check() for w in works] == [3 * count, 3 * (MANY - 700)]
    return log


def transfers(dimm: AxdimmDevice) -> Log:
    """To and from one channel, submitted and at once, while the kernel of the other runs."""
    rng = np.random.default_rng(5)
    log: Log = []
    for computing in (0, 1):
        work = Job(dimm, MANY, 6, channel=computing)
        buffers = [dimm.alloc(3000, channel=1 - computing) for _ in range(3)]
        data = [rng.standard_normal(3000).astype(np.float32) for _ in buffers]
        run = work.start()
        moves = [b.submit_write(d) for b, d in zip(buffers, data, strict=True)]
        while not moves[1].ended:
            dimm.backend.advance(37, [NEVER])
            log.append(dimm.cycles)
        found = np.empty_like(data[0])
        moves.append(buffers[0].submit_read(found))
        buffers[1][:16].write(data[0][:16])  # between lines of the transfers
        log += [digest(buffers[1][:100].read()), dimm.cycles]
        log += [move.wait().cycles for move in moves]
        np.testing.assert_array_equal(found, data[0])
        run.wait()
        assert work.check() == 3 * MANY
    return log


def waits(dimm: AxdimmDevice) -> Log:
    """That end at a bound: of no cycle, within what the host may be ahead, beyond it."""
    log: Log = []
    works = jobs(dimm)
    with dimm.acceleration():
        runs = [work.start() for work in works]
        for bound in (0, 1, 7, 63, 64, 65, 100, 1000, 4096):
            with pytest.raises(WaitTimeoutError):
                dimm.backend.wait([NEVER], bound)
            log.append(dimm.cycles)
            dimm.backend.advance(bound)
            log.append(dimm.cycles)
        for run in runs:
            run.wait()
    return [*log, *(w.check() for w in works)]


def fault(dimm: AxdimmDevice, *channels: int) -> Log:
    """Kernels read what nobody has written, in the midst of a run of both."""
    log: Log = []
    works = jobs(dimm)
    for channel in channels:
        holey = dimm.alloc(MANY, channel=channel)
        holey[: (36 + channel) * BLOCK].fill(1.0)
        works[channel].buffers["g"] = holey
    with pytest.raises(UninitialisedError) as caught, dimm.acceleration():
        run_all(works)
    log += [caught.value.address, str(caught.value), tuple(caught.value.transactions)]
    log.append(int(dimm.backend._lib.dimm_cycle(dimm.backend._dimm)))
    with pytest.raises(UninitialisedError):  # until a reset, and a cycle each
        dimm.backend.read_register(0)
    log.append(int(dimm.backend._lib.dimm_cycle(dimm.backend._dimm)))
    dimm.reset()
    log.append(dimm.cycles)
    for work in works:
        log += contents(work)
    return log


def hang(dimm: AxdimmDevice) -> Log:
    """Read data of one channel do not come; the other one ends, the first is given up."""
    works = jobs(dimm)
    lost = works[0].buffers["g"].address + 12 * 4 * BLOCK
    dimm.backend.inject(Injection(kind="never", write=False, base=lost, limit=lost + 64))
    log: Log = []
    with dimm.acceleration():
        runs = [work.start() for work in works]
        with pytest.raises(WaitTimeoutError):
            runs[0].wait(max_cycles=9_999)
        log.append(dimm.cycles)
        runs[0].abort(max_cycles=2_000)
        assert isinstance(runs[0].error, AbortedError)
        log += [runs[0].committed, dimm.cycles]
        runs[1].wait()
    dimm.backend.heal()
    assert works[1].check() == 3 * MANY
    return [*log, *contents(works[0])]


def reset(dimm: AxdimmDevice) -> Log:
    """In the midst of a run of both, and of a transfer."""
    works = jobs(dimm)
    for work in works:
        work.start()
    dimm.backend.advance(1234)
    dimm.reset()
    log: Log = [dimm.cycles]
    for work in works:
        log += contents(work)
        work.upload()
        work.start().wait()
        assert work.check() == 3 * MANY
    buffer = dimm.alloc(3000)
    move = buffer.submit_write(np.ones(3000, np.float32))
    dimm.backend.advance(333)
    move.abort()
    return [*log, dimm.cycles, digest(buffer[:256].read())]


SCENARIOS: dict[str, Callable[[AxdimmDevice], Log]] = {
    "steps": steps,
    "transfers": transfers,
    "waits": waits,
    "fault of channel 0": lambda dimm: fault(dimm, 0),
    "fault of channel 1": lambda dimm: fault(dimm, 1),
    "faults of both": lambda dimm: fault(dimm, 0, 1),
    "hang": hang,
    "reset": reset,
}


FAST = ("transfers", "faults of both")
"""Of the device that takes longest."""


def observed(url: str, threads: str, scenario: str, monkeypatch: pytest.MonkeyPatch) -> Log:
    """All that can be seen of a scenario."""
    monkeypatch.setenv(VARIABLE, threads)
    with nearstep.open(url) as dimm:
        assert isinstance(dimm, AxdimmDevice)
        before = len(os.listdir("/proc/self/task"))
        log = SCENARIOS[scenario](dimm)
        begun = len(os.listdir("/proc/self/task")) - before
        assert begun == min(int(threads), 2) - 1  # no more than there are channels
        backend = dimm.backend
        return [
            *log,
            dimm.cycles,
            backend.host_statistics,
            backend.dram_counters,
            backend.transactions(),
        ]


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
