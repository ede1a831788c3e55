"""Devices and jobs that fail: a typed error, old values on all devices, and a pool that goes on."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from nearstep.backends.emulated import Injection
from nearstep.coarse import CoarsePool
from nearstep.coarse.errors import (
    JobMismatchError,
    JobRefusedError,
    MemoryResponseError,
    PoolAbortedError,
    ResetNeededError,
    RingTimeoutError,
    SilentLinkError,
)
from nearstep.errors import GuardError, UninitialisedError, WaitTimeoutError
from nearstep_sim.coarse.pool_values import compare, reduced

from .conftest import EVERY, URLS, deep_on_tops, emulated, opened, random_arrays

ELEMENTS = 20000
"""Enough for a job not to have ended when registers have been read a few times."""


@pytest.fixture(params=EVERY)
def pool(request: pytest.FixtureRequest) -> Iterator[CoarsePool]:
    with opened(request.param) as each:
        yield each


def check_recovered(pool, tensor, arrays) -> None:
    """The old values are there, a reset is asked for, and after it the pool goes on."""
    assert compare(tensor, arrays) == 4 * ELEMENTS
    for node in pool.device.nodes:
        assert node.sync0.error.cause == node.sync1.error.cause == node.pool.error.cause
    with pytest.raises(ResetNeededError):
        pool.submit(tensor)
    pool.reset()
    assert {node.sync0.error.cause.name for node in pool.device.nodes} == {"NONE"}
    pool.all_reduce(tensor)
    assert compare(tensor, reduced(pool, arrays)) == 4 * ELEMENTS


@pytest.mark.parametrize("dead", [0, *(pytest.param(n, marks=pytest.mark.deep) for n in (1, 2, 3))])
def test_a_dead_peer_is_named_by_a_neighbour(pool, dead) -> None:
    arrays = random_arrays(pool, ELEMENTS, seed=dead)
    tensor = pool.tensor(arrays)
    event = pool.submit(tensor)
    emulated(pool).kill(dead)
    with pytest.raises(SilentLinkError) as found:
        event.wait()
    error = found.value
    assert error.peer == dead
    assert error.device in {(dead - 1) % 4, (dead + 1) % 4}
    assert error.port == int(error.device == (dead - 1) % 4)
    causes = dict(error.causes)
    assert causes.pop((dead + 2) % 4) == "PEER"
    assert set(causes.values()) == {"SILENT"}
    assert event.error is error
    assert not event.done
    emulated(pool).revive(dead)
    check_recovered(pool, tensor, arrays)


@deep_on_tops
def test_a_peer_that_stays_dead_ends_every_job(pool) -> None:
    arrays = random_arrays(pool, ELEMENTS, seed=1)
    tensor = pool.tensor(arrays)
    emulated(pool).kill(2)
    for _ in range(2):
        with pytest.raises(SilentLinkError):
            pool.all_reduce(tensor)
        pool.reset()
    assert compare(tensor, arrays) == 4 * ELEMENTS


def test_of_two_devices_the_only_link_is_named() -> None:
    url = URLS["golden"].replace("devices=4", "devices=2")
    with CoarsePool.open(url) as pool:
        tensor = pool.tensor(100)
        emulated(pool).kill(1)
        with pytest.raises(SilentLinkError) as found:
            pool.all_reduce(tensor)
        assert (found.value.device, found.value.port, found.value.peer) in {(0, 1, 1), (1, 0, 0)}


def test_a_peer_that_is_never_dead_is_waited_for_in_vain() -> None:
    with CoarsePool.open(URLS["golden"], silence_cycles=0) as pool:
        emulated(pool).kill(1)
        pool.device.nodes[0].pool.link.used = 0  # nothing can come
        tensor = pool.tensor(ELEMENTS)
        (part,) = pool.split(ELEMENTS, group=0)
        addresses = [tensor.front(device).address for device in range(pool.devices)]
        job = pool.rings.make_job(part, 0, 0, sources=addresses, destinations=addresses)
        pool.rings.push(job, 3)
        assert [wait.device for wait in pool.rings.waits()] == [3]


@pytest.mark.parametrize(
    "field",
    ["tag", *(pytest.param(f, marks=pytest.mark.deep) for f in ("elements", "operation", "wire"))],
)
def test_a_job_pushed_wrongly_through_registers_ends_all_jobs(pool, field) -> None:
    """Device 2 gets another job than the others."""
    arrays = random_arrays(pool, ELEMENTS, seed=1)
    tensor = pool.tensor(arrays)
    others = pool.tensor(64)
    core = pool.device.nodes[2].sync0
    at = pool.device.local_address
    core.source.value = at(others.front(2).address, 2)
    core.destination.value = at(others.back(2).address, 2)
    wrong = {"operation": 0, "wire": 0, "tag": 1} | ({field: 2} if field != "elements" else {})
    core.elements.value = 63 if field == "elements" else 64
    core.scale.value = 1.0
    core.job.set(**wrong)
    core.start.go = 1
    with pytest.raises(JobMismatchError) as found:
        pool.all_reduce(tensor)
    assert set(found.value.causes) == {0, 1, 2, 3}
    assert set(found.value.causes.values()) <= {"MISMATCH", "PEER"}
    assert found.value.causes[found.value.device] == "MISMATCH"
    check_recovered(pool, tensor, arrays)


@pytest.mark.parametrize("cause", ["UNSUPPORTED", "ALIGNMENT", "OVERLAP"])
def test_a_job_that_no_device_can_do_is_refused_with_its_cause(pool, cause) -> None:
    """Pushed through registers: the runtime never makes such a job."""
    arrays = random_arrays(pool, ELEMENTS, seed=1)
    tensor = pool.tensor(arrays)
    core, at = pool.device.nodes[2].sync0, pool.device.local_address(tensor.front(2).address, 2)
    core.source.value = at + 4 * (cause == "ALIGNMENT")
    core.destination.value = at if cause == "OVERLAP" else at + 4096
    core.elements.value = 64
    core.job.set(operation=3 if cause == "UNSUPPORTED" else 0, wire=0, tag=1)
    core.start.go = 1
    with pytest.raises(JobRefusedError) as found:
        pool.all_reduce(tensor)
    assert (found.value.device, found.value.cause) == (2, cause)
    check_recovered(pool, tensor, arrays)


def test_a_job_on_one_device_alone_says_who_waits_for_whom(pool) -> None:
    arrays = random_arrays(pool, 64, seed=1)
    tensor = pool.tensor(arrays)
    event = pool._event(tensor, "sum", "fp32", 1)
    pool.rings.begin(event)
    pool.rings.push(event.jobs[0], 1)
    with pytest.raises(RingTimeoutError) as found:
        event.wait(20000)
    (wait,) = found.value.waits
    assert wait.device == 1
    assert set(wait.peers) == {0, 2, 3}
    assert "device 1 runs job" in str(found.value)
    assert "without a job of group 1" in str(found.value)
    assert not event.ended
    pool.reset()
    assert isinstance(event.error, PoolAbortedError)
    assert compare(tensor, arrays) == 256
    pool.all_reduce(tensor)
    assert compare(tensor, reduced(pool, arrays)) == 256


def test_a_reset_ends_jobs_in_work(pool) -> None:
    arrays = random_arrays(pool, ELEMENTS, seed=1)
    tensor = pool.tensor(arrays)
    event = pool.submit(tensor)
    pool.reset()
    with pytest.raises(PoolAbortedError):
        event.wait()
    assert compare(tensor, arrays) == 4 * ELEMENTS
    pool.all_reduce(tensor)
    assert compare(tensor, reduced(pool, arrays)) == 4 * ELEMENTS


def test_an_abort_through_the_registers_of_a_core_ends_all_jobs(pool) -> None:
    arrays = random_arrays(pool, ELEMENTS, seed=1)
    tensor = pool.tensor(arrays)
    event = pool.submit(tensor)
    pool.device.nodes[2].sync0.control.abort = 1
    with pytest.raises(PoolAbortedError) as found:
        event.wait()
    assert found.value.device == 2
    check_recovered(pool, tensor, arrays)


def test_a_device_that_forgot_its_error_is_known_to_the_others(pool) -> None:
    tensor = pool.tensor(ELEMENTS)
    event = pool.submit(tensor)
    pool.device.nodes[2].sync0.control.abort = 1
    pool.device.nodes[2].pool.control.abort = 1
    with pytest.raises(PoolAbortedError) as found:
        event.wait()
    assert found.value.device == 2
    assert [found.value.causes[device] for device in (0, 1, 3)] == ["PEER"] * 3


@deep_on_tops
def test_many_resets_go_around_all_epochs(pool) -> None:
    arrays = random_arrays(pool, 100, seed=1)
    for _ in range(20):
        pool.reset()
        tensor = pool.tensor(arrays)
        pool.all_reduce(tensor)
        assert compare(tensor, reduced(pool, arrays)) == 400
        tensor.free()


def test_a_window_that_was_changed_refuses_jobs(pool) -> None:
    arrays = random_arrays(pool, ELEMENTS, seed=1)
    tensor = pool.tensor(arrays)
    pool.device.nodes[1].pool.window_limit.value = 4096
    with pytest.raises(JobRefusedError) as found:
        pool.all_reduce(tensor)
    assert (found.value.device, found.value.cause) == (1, "WINDOW")
    assert [found.value.causes[device] for device in (0, 2, 3)] == ["PEER"] * 3
    check_recovered(pool, tensor, arrays)


@pytest.mark.parametrize("write", [pytest.param(False, marks=pytest.mark.deep), True])
def test_an_answer_of_memory_other_than_okay(pool, write) -> None:
    arrays = random_arrays(pool, ELEMENTS, seed=1)
    tensor = pool.tensor(arrays)
    buffer = tensor.back(3) if write else tensor.front(3)
    limit = buffer.address + buffer.nbytes
    emulated(pool).inject(
        Injection(kind="slverr", write=write, base=buffer.address, limit=limit, nth=int(write))
    )
    with pytest.raises(MemoryResponseError) as found:
        pool.all_reduce(tensor)
    assert found.value.device == 3
    assert found.value.cause == ("WRITE_RESPONSE" if write else "READ_RESPONSE")
    emulated(pool).heal()
    check_recovered(pool, tensor, arrays)


@deep_on_tops
def test_memory_that_never_answers(pool) -> None:
    """Not even the host's loads pass; a hard reset brings the memory back, with what it held."""
    arrays = random_arrays(pool, ELEMENTS, seed=1)
    tensor = pool.tensor(arrays)
    emulated(pool).inject(Injection(kind="never", write=False))
    with pytest.raises(RingTimeoutError, match="device 0 runs job"):
        pool.all_reduce(tensor, max_cycles=20_000)
    emulated(pool).heal()
    pool.device.reset()
    pool.reset()
    assert compare(tensor, arrays) == 4 * ELEMENTS
    pool.all_reduce(tensor)
    assert compare(tensor, reduced(pool, arrays)) == 4 * ELEMENTS


def test_guards_and_memory_that_nobody_wrote_are_faults(golden_pool) -> None:
    pool = golden_pool
    tensor = pool.tensor(64)
    job = pool._event(tensor, "sum", "fp32", 0)
    pool.rings.begin(job)
    for device in range(4):
        pool.rings.push(job.jobs[0], device)
    pool.device.backend.protect(tensor.back(2).address, 64)
    with pytest.raises(GuardError):
        job.wait()
    pool.device.backend.claim(tensor.front(2).address, 64)
    with pytest.raises(UninitialisedError):
        job.wait()
    assert np.all(tensor.read(0) == 0)


@deep_on_tops
def test_a_dead_device_without_a_limit_is_waited_for(pool, request) -> None:
    name = request.node.callspec.params["pool"]
    with opened(name, silence_cycles=0) as patient:
        arrays = random_arrays(patient, 200, seed=2)
        tensor = patient.tensor(arrays)
        patient.device.backend.kill(2)
        with pytest.raises(RingTimeoutError):
            patient.all_reduce(tensor, max_cycles=20_000)
        assert compare(tensor, arrays) == 800
        patient.device.backend.revive(2)
        patient.reset()
        patient.all_reduce(tensor)
        assert compare(tensor, reduced(patient, arrays)) == 800


def test_a_device_that_does_not_become_idle_is_named(pool) -> None:
    tensor = pool.tensor(random_arrays(pool, 300, seed=2))
    pool.submit(tensor)
    for node in pool.device.nodes:
        node.pool.silence_limit.value = 0
    wait = pool.device.backend.wait

    def never(polls, max_cycles) -> None:
        raise WaitTimeoutError("a poll", max_cycles)

    pool.device.backend.wait = never
    with pytest.raises(WaitTimeoutError, match=r"device 0 to become idle.*device.reset\(\)"):
        pool.reset()
    pool.device.backend.wait = wait
    pool.reset()
