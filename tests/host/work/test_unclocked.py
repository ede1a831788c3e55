"""Work without a clock, such as that of drives, goes on while other operations start."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from nearstep.backends.base import Completion
from nearstep.errors import DeviceError
from nearstep.storage.drive import DriveTransfer
from nearstep.work.clock import Clock
from nearstep.work.errors import WorkError
from nearstep.work.executor import execute
from nearstep.work.graph import Graph

from .fakes import FakeBackend, FakeWork


class Job(DriveTransfer):
    """One part, which another thread ends."""

    def __init__(self) -> None:
        super().__init__("job", [])
        self._left = 1


def test_what_has_no_clock_goes_on_while_others_start():
    jobs = [Job() for _ in range(3)]
    begun: list[int] = []

    def begin(number: int) -> Job:
        begun.append(number)
        if number == 2:  # had the first been waited for, this would not be reached
            for job in jobs:
                threading.Timer(0.01, job.end_part, [None]).start()
        return jobs[number]

    graph = Graph()
    for number in range(3):
        graph.add(f"job {number}", f"lane {number}", action=lambda n=number: begin(n))
    timeline = execute(graph)
    assert begun == [0, 1, 2]
    assert [e.operation.index for e in timeline.entries] == [0, 1, 2]
    assert all(job.done for job in jobs)


def test_what_waits_for_it_starts_at_its_end():
    job, order = Job(), []
    graph = Graph()
    first = graph.add("job", "drive", action=lambda: job)
    graph.add("after", "kernel", after=[first], action=lambda: order.append(job.ended))
    threading.Timer(0.01, job.end_part, [None]).start()
    execute(graph)
    assert order == [True]


def test_an_error_is_that_of_its_operation_and_the_others_have_ended():
    bad, other = Job(), Job()

    def begin() -> Job:  # both are under way
        threading.Timer(0.01, bad.end_part, [DeviceError("no power")]).start()
        threading.Timer(0.03, other.end_part, [None]).start()
        return other

    graph = Graph()
    graph.add("bad", "a", action=lambda: bad)
    graph.add("other", "b", action=begin)
    last = graph.add("never", "a", action=lambda: pytest.fail("was started"))
    with pytest.raises(WorkError) as caught:
        execute(graph)
    assert list(caught.value.failed) == ["0: bad"]
    assert other.ended
    assert str(last) in str(caught.value)


class Steps(FakeBackend):
    """A device without a clock."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.cycles = 0, None

    def advance(self, max_cycles: int, polls: Sequence[object] = ()) -> None:
        self.steps += 1


class Kernel(Completion):
    """Work of such a device, which ends after some looks at it."""

    error = cycles = None

    def __init__(self, backend: Steps, steps: int) -> None:
        self.backend = backend
        self._end = backend.steps + steps

    @property
    def ended(self) -> bool:
        return self.backend.steps >= self._end

    def wait(self, max_cycles: int | None = None) -> Kernel:
        return self


def test_beside_a_device_without_a_clock_a_drive_gets_more_before_time_passes():
    device, order = Steps(), []

    class Quick(Job):
        looks = 0

        @property
        def ended(self) -> bool:
            self.looks += 1
            return self.looks > 1  # has not when it is started, and has when it is looked at

        def join(self) -> None:
            pass

    graph = Graph()
    graph.add("kernel", "card", action=lambda: Kernel(device, 3))
    read = graph.add("read", "drive", action=Quick)
    graph.add("next", "drive", after=[read], action=lambda: order.append(device.steps))
    execute(graph, Clock([device]))
    assert (order, device.steps) == ([0], 3)


@pytest.mark.parametrize("early", [False, True])
def test_beside_a_clock_the_course_does_not_depend_on_when_a_drive_ends(early):
    """While a kernel works, or after it; the second that was started is the first to end."""
    device = FakeBackend()
    jobs = [Job(), Job()]

    def kernel() -> FakeWork:
        for after_s, job in zip((0.02, 0.04), reversed(jobs), strict=True):
            if early:
                job.end_part(None)
            else:
                threading.Timer(after_s, job.end_part, [None]).start()
        return FakeWork(device, "kernel", 100)

    graph = Graph()
    first = graph.add("first", "drive a", action=lambda: jobs[0])
    second = graph.add("second", "drive b", action=lambda: jobs[1])
    graph.add("kernel", "card", action=kernel)
    for number, job in enumerate((second, first)):
        work = (lambda n: lambda: FakeWork(device, f"behind {n}", 5))(number)
        graph.add(f"behind {number}", "card", after=[job], action=work)
    found = execute(graph, Clock([device])).entries
    assert [(e.operation.index, e.start, e.end) for e in found] == [
        (0, 0, 100),
        (1, 0, 105),
        (2, 0, 100),
        (4, 100, 105),
        (3, 105, 110),
    ]


def test_an_error_of_a_look_at_what_has_no_clock_is_that_of_its_operation():
    device = Steps()

    class Unseen(Job):
        looks = 0

        @property
        def ended(self) -> bool:
            self.looks += 1
            if self.looks > 1:
                raise DeviceError("is gone")
            return False

    job, other = Unseen(), Job()
    threading.Timer(0.01, other.end_part, [None]).start()
    threading.Timer(0.02, job.end_part, [None]).start()
    graph = Graph()
    graph.add("unseen", "a", action=lambda: job)
    graph.add("other", "b", action=lambda: other)
    last = graph.add("never", "a", action=lambda: pytest.fail("was started"))
    with pytest.raises(WorkError) as caught:
        execute(graph, Clock([device]))
    assert list(map(repr, caught.value.failed.values())) == [repr(DeviceError("is gone"))]
    assert str(last) in str(caught.value)
    assert job._left == 0, "nothing is under way any more"
    assert other.ended


def test_an_interrupt_between_a_start_and_the_next_operation_waits_for_what_was_started():
    job = Job()

    class Interrupted(Clock):
        def after(self, begun, in_flight):
            raise KeyboardInterrupt

    threading.Timer(0.02, job.end_part, [None]).start()
    graph = Graph()
    graph.add("job", "drive", action=lambda: job)
    with pytest.raises(KeyboardInterrupt) as caught:
        execute(graph, Interrupted())
    assert job.ended
    assert caught.value.__notes__ == ["under way: 0: job; not run: none"]


def test_a_drive_is_waited_for_however_often_that_is_interrupted():
    class Impatient(Job):
        waits = 0

        def join(self) -> None:
            self.waits += 1
            if self.waits < 4:
                raise KeyboardInterrupt
            super().join()

    job = Impatient()
    threading.Timer(0.02, job.end_part, [None]).start()
    graph = Graph()
    graph.add("job", "drive", action=lambda: job)
    with pytest.raises(KeyboardInterrupt):
        execute(graph)
    assert (job.ended, job.waits) == (True, 4)
