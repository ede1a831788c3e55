"""Work without a clock, such as that of drives, goes on while other operations start."""

from __future__ import annotations

import threading

import pytest

from nearstep.errors import DeviceError
from nearstep.storage.transfer import Transfer
from nearstep.work.errors import WorkError
from nearstep.work.executor import execute
from nearstep.work.graph import Graph


class Job(Transfer):
    """One part, which another thread ends."""

    def __init__(self) -> None:
        super().__init__("job", 1, lambda: 0, timeout_s=10)


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
    graph = Graph()
    graph.add("bad", "a", action=lambda: bad)
    graph.add("other", "b", action=lambda: other)
    last = graph.add("never", "a", action=lambda: pytest.fail("was started"))
    threading.Timer(0.01, bad.end_part, [DeviceError("no power")]).start()
    threading.Timer(0.03, other.end_part, [None]).start()
    with pytest.raises(WorkError) as caught:
        execute(graph)
    assert list(caught.value.failed) == ["0: bad"]
    assert other.ended
    assert str(last) in str(caught.value)
