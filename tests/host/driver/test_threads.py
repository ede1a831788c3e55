"""What several threads do to a device at once."""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator

import pytest

import nearstep
from nearstep.backends.emulated import Injection
from nearstep.errors import BusyError, ModeError
from nearstep.updater import turns
from nearstep.updater.device import KernelDevice

from .conftest import DIMMS, FULL, URLS
from .job import Job

WITHOUT_MODES = {name: URLS[name] for name in ("golden-cpp", "golden-card", "sim-card")}
SHARED = WITHOUT_MODES | {name: DIMMS[name] for name in ("golden-dimm", "sim-dimm")}


@pytest.fixture(params=SHARED)
def shared(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    with nearstep.open(SHARED[request.param]) as opened:
        assert isinstance(opened, KernelDevice)
        yield opened


@pytest.fixture
def often() -> Iterator[None]:
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def at_once(*actions: Callable[[], object]) -> None:
    """Each in a thread of its own, that begin together; the first error is raised."""
    begin = threading.Barrier(len(actions))
    errors: list[BaseException] = []

    def work(action: Callable[[], object]) -> None:
        try:
            begin.wait()
            action()
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=work, args=(action,)) for action in actions]
    for each in running:
        each.start()
    for each in running:
        each.join()
    if errors:
        raise errors[0]


def rounds(device: KernelDevice) -> int:
    """Fewer where every cycle is simulated."""
    return 25 if device.cycles is None else 5


@pytest.mark.parametrize("shared", WITHOUT_MODES, indirect=True)
def test_runs_that_threads_start_on_one_channel_are_all_right(shared, often) -> None:
    """Each is a command of its own, with arrays and numbers of its own."""
    compared: Counter[int] = Counter()

    def steps(thread: int) -> None:
        for number in range(rounds(shared)):
            job = Job(shared, 40 + 90 * thread, seed=100 * thread + number, step=1 + thread)
            run = job.start().wait()
            assert (run.committed, run.done) == (job.count, True)
            compared[thread] += job.check()
            job.free()

    at_once(*(lambda thread=thread: steps(thread) for thread in range(3)))
    assert compared == {thread: rounds(shared) * 3 * (40 + 90 * thread) for thread in range(3)}


def test_threads_that_change_modes_and_copy_take_turns(shared, often) -> None:
    """As two optimizers on one device do."""
    compared: Counter[int] = Counter()

    def steps(thread: int) -> None:
        for number in range(rounds(shared)):
            channel = number % shared.channel_count
            job = Job(shared, 40 + 90 * thread, seed=100 * thread + number, channel=channel)
            with shared.acceleration():
                job.start().wait()
            compared[thread] += job.check()
            job.free()

    at_once(*(lambda thread=thread: steps(thread) for thread in range(3)))
    assert compared == {thread: rounds(shared) * 3 * (40 + 90 * thread) for thread in range(3)}


def test_threads_of_one_region_each_run_a_channel(often) -> None:
    with nearstep.open(DIMMS["golden-dimm"]) as dimm:
        jobs = [Job(dimm, 500, seed=channel, channel=channel % 2) for channel in range(4)]
        with dimm.acceleration():
            at_once(*(lambda job=job: job.start().wait() for job in jobs))
        assert sum(job.check() for job in jobs) == 4 * 3 * 500


def test_scans_that_threads_start_have_their_own_results(often) -> None:
    """Results are in registers, which the next run uses, too."""
    found: Counter[float] = Counter()
    with nearstep.open(FULL["golden-card"]) as device:

        def scans(value: float) -> None:
            gradients = device.alloc(64)
            gradients.fill(value)
            for _ in range(60):
                run = device.scan(gradients).wait()
                assert (run.sum_of_squares, run.found_inf) == (64 * value * value, False)
                found[value] += 1

        at_once(*(lambda value=value: scans(value) for value in (1.0, 2.0, 4.0)))
    assert found == {1.0: 60, 2.0: 60, 4.0: 60}


@pytest.mark.parametrize("shared", WITHOUT_MODES, indirect=True)
def test_a_start_waits_for_the_run_of_another_thread_but_not_for_its_own(shared) -> None:
    first, second = Job(shared, 3001, seed=1), Job(shared, 300, seed=2)
    run = first.start()
    with pytest.raises(BusyError, match="adam of 3001 elements has not ended"):
        second.start()
    at_once(lambda: second.start().wait())
    assert run.done
    assert first.check() + second.check() == 3 * 3301


def test_a_start_says_that_the_run_of_another_thread_does_not_end() -> None:
    with nearstep.open(URLS["golden-cpp"]) as device:
        first, second = Job(device, 300, seed=1), Job(device, 300, seed=2)
        device.backend.inject(Injection(kind="never", write=False))
        run = first.start()
        with pytest.raises(BusyError, match="of another thread has not ended"):
            at_once(lambda: second.start())
        assert not run.done
        device.reset()
        device.backend.heal()
        first.upload()
        assert first.start().wait().done


def test_threads_that_would_wait_for_each_other_are_told() -> None:
    """Each has a channel and copies to that of the other: one gives way, the other goes on."""
    with nearstep.open(DIMMS["golden-dimm"]) as dimm:
        buffers = [dimm.alloc(16, channel=channel) for channel in (0, 1)]
        inside = threading.Barrier(2)
        told: list[tuple[int, ModeError]] = []

        def use(channel: int) -> None:
            with dimm.acceleration(channel):
                inside.wait()
                try:
                    buffers[1 - channel].fill(channel)
                except ModeError as error:
                    told.append((channel, error))

        at_once(lambda: use(0), lambda: use(1))
        ((channel, error),) = told
        assert "has it, and waits for a channel of this one" in str(error)
        assert (error.channel, error.actual) == (1 - channel, "acceleration")
        assert buffers[channel].read().tolist() == [1 - channel] * 16


def test_a_thread_that_has_a_channel_and_does_nothing_is_named(monkeypatch) -> None:
    monkeypatch.setattr(turns, "STALL_SECONDS", 0.01)
    with nearstep.open(DIMMS["golden-dimm"]) as dimm:
        buffer = dimm.alloc(16)
        with dimm.acceleration(0):
            with pytest.raises(ModeError, match="thread 'MainThread' has it, and did nothing"):
                at_once(lambda: buffer.fill(1.0))
            with pytest.raises(ModeError, match="enter acceleration mode: channel 0 must be in"):
                at_once(lambda: dimm.acceleration().__enter__())
            with pytest.raises(ModeError, match="normal mode, not acceleration"):
                buffer.fill(1.0)  # its own: at once
        buffer.fill(2.0)
        assert buffer.read().tolist() == [2.0] * 16


def test_a_reset_gives_the_channels_of_another_thread_back() -> None:
    with nearstep.open(DIMMS["golden-dimm"]) as dimm:
        buffer = dimm.alloc(16)
        with dimm.acceleration():
            dimm.reset()
            at_once(lambda: buffer.fill(1.0))
            assert buffer.read().tolist() == [1.0] * 16
            with dimm.acceleration(1):  # the outer one has no channel any more
                pass
        with dimm.acceleration():
            pass
