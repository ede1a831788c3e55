"""A queue of work: the same as a graph that is known at once, and what waits for what."""

from __future__ import annotations

import random
from functools import partial

import numpy as np
import pytest

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.errors import ArgumentError
from nearstep.work.clock import Clock
from nearstep.work.operation import Range
from nearstep.work.queue import Queue

from ..driver.conftest import DIMMS
from .fakes import random_graph

SEED = 610


def test_what_is_added_before_time_passes_runs_as_a_graph() -> None:
    """But for priorities, which cannot know what comes later: here they are all the same."""
    print(f"seed {SEED}")
    rng, checked = random.Random(SEED), 0
    for _ in range(100):
        graph = random_graph(rng.randrange(1 << 30), rng.randrange(1, 30))
        queue, made = Queue(Clock()), []
        for each in graph:
            made.append(
                queue.add(
                    each.name,
                    *each.holds,
                    reads=each.reads,
                    writes=each.writes,
                    after=[made[need] for need in each.needs],
                    seconds=(each.seconds or 0) + 1e-12,
                )
            )
        found = queue.finish()
        assert sorted(e.operation.index for e in found.entries) == list(range(len(graph)))
        ends = {e.operation.index: e.end for e in found.entries}
        for entry in found.entries:
            assert all(ends[need] <= entry.start for need in entry.operation.needs)
            assert set(graph[entry.operation.index].needs) <= set(entry.operation.needs)
            checked += 1
        assert found.makespan <= sum(entry.duration for entry in found.entries)
        assert not found.entries or found.limit <= found.makespan
    assert checked > 1000


def test_time_passes_only_where_the_program_waits() -> None:
    queue = Queue(Clock())
    first = queue.add("first", "a", seconds=5e-12)
    second = queue.add("second", "b", seconds=3e-12)
    third = queue.add("third", "b", seconds=4e-12, after=[first])
    assert queue.clock.now == 0
    assert not queue.has_ended([first])
    queue.wait([second])
    assert (queue.clock.now, queue.has_ended([second]), queue.has_ended([first])) == (
        3,
        True,
        False,
    )
    late = queue.add("late", "c", seconds=10e-12)
    queue.wait_for_one([[third], [first, second]])
    assert queue.clock.now == 5
    assert [e.operation.name for e in queue.finish().entries] == [
        "first",
        "second",
        "late",
        "third",
    ]
    assert queue.clock.now == 13
    assert queue.has_ended([late, third])
    again = queue.add("again", "a", seconds=1e-12, after=[late])
    assert again.index == 0
    assert again.needs == ()
    queue.finish()
    assert [e.end for e in queue.timeline.entries] == [5, 3, 13, 9, 14]


def test_without_overlap_each_operation_ends_before_the_program_goes_on() -> None:
    queue = Queue(Clock(), overlaps=False)
    queue.add("first", "a", seconds=5e-12)
    assert queue.clock.now == 5
    queue.add("second", "b", seconds=3e-12)
    assert queue.clock.now == 8


def test_what_is_not_in_the_queue_waits_for_the_bytes_that_it_shares() -> None:
    queue = Queue(Clock())
    queue.add("write", "a", writes=[Range("m", 0, 8)], seconds=2e-12)
    queue.add("read", "b", reads=[Range("m", 16, 24)], seconds=7e-12)
    for where, changes, now in (
        (Range("m", 8, 16), True, 0),
        (Range("other", 0, 8), True, 0),
        (Range("m", 16, 24), False, 0),
        (Range("m", 7, 9), False, 2),
        (Range("m", 16, 17), True, 7),
    ):
        queue.settle(where, changes=changes)
        assert queue.clock.now == now
    queue.add("more", "a", seconds=1e-12)
    queue.settle_all()
    assert queue.clock.now == 8


@pytest.mark.parametrize("overlaps", [True, False])
def test_what_fails_is_raised_where_the_program_waits(overlaps: bool) -> None:
    told: list[BaseException] = []
    queue = Queue(Clock(), told.append, overlaps=overlaps)
    queue.add("first", "a", seconds=3e-12)

    def fail() -> None:
        raise ZeroDivisionError("no")

    def broken() -> None:
        queue.add("broken", "b", seconds=1e-12, action=fail)
        queue.add("never", "c", seconds=1e-12)
        queue.finish()

    with pytest.raises(ZeroDivisionError, match="no") as caught:
        broken()
    assert told == [caught.value]
    assert "1: broken failed" in caught.value.__notes__[0]
    assert queue.clock.now == 3  # what was under way has ended
    queue.add("next", "b", seconds=1e-12)
    assert queue.finish().makespan == 1
    assert [e.operation.name for e in queue.timeline.entries] == ["next"]


def test_an_operation_that_cannot_be_modelled_is_refused() -> None:
    with nearstep.open(DIMMS["golden-dimm"]) as device:
        queue = Queue(Clock([device.backend]))
        queue.add("before", "a", action=lambda: None)
        with pytest.raises(ArgumentError, match="hertz"):
            queue.add("modelled", "a", seconds=1e-9)
        queue.add("after", "a", action=lambda: None)
        assert [e.operation.name for e in queue.finish().entries] == ["after"]


def test_a_device_with_a_queue_waits_for_all_before_it_does_something_else() -> None:
    with nearstep.open(DIMMS["sim-dimm"]) as device:
        assert isinstance(device, AxdimmDevice)
        buffer = device.alloc(256)
        other = device.alloc(256, channel=1)
        data = np.arange(256, dtype=np.float32)
        device.queue = queue = Queue(Clock([device.backend], 200e6))
        for each, factor in ((buffer, 1), (other, 2)):
            queue.add(
                "write",
                "bus",
                writes=[Range.of(each)],
                action=partial(each.submit_write, factor * data),
            )
        assert not queue.has_ended(queue._graph)
        assert (other.read() == 2 * data).all()
        assert queue.has_ended(queue._graph)
        assert (buffer.read() == data).all()
        device.queue = None
