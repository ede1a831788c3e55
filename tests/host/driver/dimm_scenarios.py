"""What two simulated DIMMs of equal hardware must show alike: steps, transfers, waits, faults and
resets, and all that can be seen of them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from nearstep.axdimm.device import AxdimmDevice
from nearstep.backends.base import Poll
from nearstep.backends.emulated import Injection
from nearstep.errors import AbortedError, UninitialisedError, WaitTimeoutError
from nearstep_spec.updater.registers import ARRAYS

from .conftest import BLOCK
from .job import Job

MANY = 40 * BLOCK + 5
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


def seen(dimm: AxdimmDevice, scenario: str) -> Log:
    """All that can be seen of a scenario."""
    log = SCENARIOS[scenario](dimm)
    backend = dimm.backend
    return [
        *log,
        dimm.cycles,
        backend.host_statistics,
        backend.dram_counters,
        backend.transactions(),
    ]
