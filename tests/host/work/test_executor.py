"""Runs of graphs, on models and on devices that only take time."""

from __future__ import annotations

import itertools
import json

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearstep.backends.base import Ended
from nearstep.errors import ArgumentError, DeviceError
from nearstep.work.clock import QUANTUM_CYCLES, Clock
from nearstep.work.errors import WorkError
from nearstep.work.executor import Execution, execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Transfer
from nearstep.work.timeline import Timeline
from nearstep.work.trace import trace
from nearstep_spec.platform.machine import Hop

from .fakes import FakeBackend, FakeWork, conflict, random_graph

PS = 1e-12
seeded = given(seed=st.integers(0, 1 << 32), count=st.integers(0, 40))
examples = settings(max_examples=150, deadline=None, derandomize=True)


@examples
@seeded
def test_conflicts_are_in_order_and_resources_are_held_by_one(seed, count):
    graph = random_graph(seed, count)
    timeline = execute(graph)
    assert sorted(e.operation.index for e in timeline.entries) == list(range(count))
    at = {e.operation.index: e for e in timeline.entries}
    for later in graph:
        for earlier in graph[: later.index]:
            if conflict(earlier, later) or earlier.index in later.needs:
                assert at[earlier.index].end <= at[later.index].start
    for entries in timeline.lanes.values():
        for one, other in itertools.pairwise(sorted(entries, key=lambda e: (e.start, e.end))):
            assert one.end <= other.start


@examples
@seeded
def test_makespan_has_its_lower_bounds(seed, count):
    graph = random_graph(seed, count)
    timeline = execute(graph)
    assert all(timeline.makespan >= timeline.busy(resource) for resource in timeline.lanes)
    weighted = networkx.DiGraph()
    weighted.add_nodes_from(["end", *range(count)])
    lasts = {e.operation.index: e.duration for e in timeline.entries}
    for each in graph:
        weighted.add_edge(each.index, "end", weight=lasts[each.index])
        weighted.add_edges_from((n, each.index, {"weight": lasts[n]}) for n in each.needs)
    longest = networkx.dag_longest_path_length(weighted)
    assert timeline.makespan >= longest
    path = timeline.critical_path()
    assert sum(each.duration for each in path) == longest
    assert all(a.operation.index in b.operation.needs for a, b in itertools.pairwise(path))


@examples
@seeded
def test_an_operation_starts_as_soon_as_it_can(seed, count):
    """No operation waits while all that it needs has ended and all that it holds is free, except
    for one that goes first."""
    graph = random_graph(seed, count)
    timeline = execute(graph)
    at = {e.operation.index: e for e in timeline.entries}
    waited = 0
    for each in timeline.entries:
        ready = max((at[n].end for n in each.operation.needs), default=0)
        for moment in range(ready, each.start):
            holders = [
                e
                for e in timeline.entries
                if e.start <= moment < e.end and set(e.operation.holds) & set(each.operation.holds)
            ]
            assert holders, f"{each} could have started at {moment}"
            waited += 1
    if count == 40:
        assert waited


def test_priority_goes_before_program_order_and_ties_to_it():
    graph = Graph()
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", 1)):
        graph.add(name, "r", seconds=PS, priority=priority)
    assert [e.operation.name for e in execute(graph).entries] == ["b", "c", "a", "d"]


def test_what_waits_for_two_resources_lets_others_pass():
    graph = Graph()
    graph.add("a", "q", seconds=5 * PS)
    graph.add("b", "r", seconds=1 * PS)
    graph.add("c", "r", "q", seconds=1 * PS)
    graph.add("d", "r", seconds=2 * PS)
    starts = {e.operation.name: e.start for e in execute(graph).entries}
    assert starts == {"a": 0, "b": 0, "d": 1, "c": 5}


def test_an_empty_graph_takes_no_time():
    timeline = execute(Graph())
    assert (timeline.makespan, timeline.entries, timeline.critical_path()) == (0, [], [])
    assert trace(timeline)["traceEvents"] == []


def test_the_same_graph_takes_the_same_course():
    traces = {json.dumps(trace(execute(random_graph(7, 40)))) for _ in range(5)}
    assert len(traces) == 1


def test_a_trace_has_each_operation_in_the_lane_of_each_resource():
    graph = random_graph(11, 40)
    events = trace(execute(graph))["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    found = sorted((e["args"]["operation"], lanes[e["tid"]]) for e in events if e["ph"] == "X")
    assert found == sorted((each.index, r) for each in graph for r in each.holds)
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")


def on(backend, name, lasts, **options):
    return lambda: FakeWork(backend, name, lasts, **options)


def test_time_passes_as_far_as_the_next_end():
    backend = FakeBackend(cycles=1000)
    graph = Graph()
    first = graph.add("a", "r", action=on(backend, "a", 30))
    graph.add("b", "s", action=on(backend, "b", 50))
    graph.add("c", "r", after=[first], action=on(backend, "c", 5))
    timeline = execute(graph, Clock([backend]))
    assert [(e.operation.name, e.start, e.end, e.cycles) for e in timeline.entries] == [
        ("a", 0, 30, 30),
        ("b", 0, 50, 50),
        ("c", 30, 35, 5),
    ]


def test_commands_to_one_device_take_time_on_all():
    slow, quick = FakeBackend(5), FakeBackend(70_000)
    graph = Graph()
    graph.add("a", "r", action=on(quick, "a", 1000))
    graph.add("b", "s", action=on(slow, "b", 100, command_cycles=40))
    graph.add("c", "t", action=on(quick, "c", 10))
    timeline = execute(graph, Clock([slow, quick]))
    starts = {e.operation.name: e.start for e in timeline.entries}
    assert starts == {"a": 0, "b": 0, "c": 40}
    assert timeline.makespan == 1000


def test_devices_that_work_together_are_a_quantum_apart_at_most():
    backends = [FakeBackend(), FakeBackend()]
    graph = Graph()
    for number, backend in enumerate(backends):
        for length in (700, 11, 2048, 90):
            graph.add("x", f"device {number}", action=on(backend, "x", length + number))
    timeline = execute(graph, Clock(backends))
    late = [e.duration - e.cycles for e in timeline.entries]
    print("late", late)
    assert len(late) == 8
    assert all(0 <= each <= QUANTUM_CYCLES for each in late)


def test_an_operation_can_have_work_on_two_devices():
    backends = [FakeBackend(), FakeBackend()]
    graph = Graph()

    def copy():
        FakeWork(backends[0], "read", 30).wait()
        return FakeWork(backends[1], "write", 20)

    graph.add("before", "a", action=on(backends[0], "before", 100))
    graph.add("copy", "a", "b", action=copy)
    graph.add("after", "b", action=on(backends[1], "after", 10))
    timeline = execute(graph, Clock(backends))
    at = {e.operation.name: (e.start, e.end) for e in timeline.entries}
    assert at["copy"][0] == at["before"][1] or at["copy"][0] == at["after"][1]
    assert at["copy"][1] - at["copy"][0] == 50


def test_models_and_devices_share_a_clock_and_idle_devices_are_not_simulated():
    backend = FakeBackend()
    graph = Graph()
    read = graph.add("drive", "drive", seconds=1e-3)
    graph.add("run", "kernel", after=[read], action=on(backend, "run", 50))
    timeline = execute(graph, Clock([backend], hertz=1e9))
    assert timeline.makespan == 1_000_050
    assert backend.cycles == 50


def test_a_model_beside_a_device_needs_a_frequency():
    graph = Graph()
    graph.add("first", "r", action=lambda: pytest.fail("was started"))
    graph.add("model", "s", seconds=1)
    with pytest.raises(ArgumentError, match="hertz must be given"):
        execute(graph, Clock([FakeBackend()]))


def test_an_action_with_a_model_takes_the_time_of_the_model():
    done = []
    graph = Graph()
    graph.add("x", "r", action=lambda: done.append(1), seconds=7 * PS)
    graph.add("y", "r", action=lambda: Ended(3), seconds=2 * PS)
    timeline = execute(graph)
    assert [(e.start, e.end, e.cycles) for e in timeline.entries] == [(0, 7, None), (7, 9, 3)]
    assert done == [1]


def failing(backend, action):
    """A graph with work before, beside and behind the operation that fails."""
    graph = Graph()
    before = graph.add("before", "r", action=on(backend, "before", 10))
    graph.add("beside", "s", action=on(backend, "beside", 100))
    bad = graph.add("bad", "r", after=[before], action=action)
    graph.add("behind", "t", after=[bad], action=lambda: pytest.fail("was started"))
    graph.add("later", "s", action=lambda: pytest.fail("was started"))
    return graph


def refuse():
    raise DeviceError("no")


@pytest.mark.parametrize("when", ["start", "end"])
def test_after_an_error_nothing_starts_and_what_is_under_way_ends(when):
    backend = FakeBackend()
    fault = on(backend, "bad", 5, error=DeviceError("no"))
    graph = failing(backend, refuse if when == "start" else fault)
    with pytest.raises(WorkError, match="2: bad failed: no") as caught:
        execute(graph, Clock([backend]))
    assert caught.value.done == ("0: before", "1: beside")
    assert caught.value.not_run == ("3: behind", "4: later")
    assert list(caught.value.failed) == ["2: bad"]
    assert isinstance(caught.value.__cause__, DeviceError)
    assert "end beside at 100" in backend.log


def test_what_fails_while_others_are_waited_for_is_told_too():
    backend = FakeBackend()
    graph = Graph()
    graph.add("a", "r", action=on(backend, "a", 10, error=DeviceError("first")))
    graph.add("b", "s", action=on(backend, "b", 20, error=DeviceError("second")))
    with pytest.raises(WorkError, match="a failed: first; 1: b failed, too: second") as caught:
        execute(graph, Clock([backend]))
    assert str(caught.value.__cause__) == "first"


def test_what_takes_longer_than_it_can_is_aborted():
    backend = FakeBackend()
    graph = failing(backend, on(backend, "bad", 10_000, bound=50))
    with pytest.raises(WorkError, match="bad did not end"):
        execute(graph, Clock([backend]))
    assert any(line.startswith("abort bad") for line in backend.log)


def test_a_device_that_fails_as_a_whole_ends_all_that_it_did():
    backend = FakeBackend()

    def broken():
        backend.raises = DeviceError("broken")
        return FakeWork(backend, "bad", 50)

    with pytest.raises(WorkError, match="broken") as caught:
        execute(failing(backend, broken), Clock([backend]))
    assert set(caught.value.failed) == {"1: beside", "2: bad"}
    assert caught.value.done == ("0: before",)


def test_what_is_left_on_a_device_that_goes_on_failing_ends_too():
    """One operation says what became of it; the device fails again when the other is waited for."""
    backend = FakeBackend()

    class Faulty(FakeWork):
        @property
        def ended(self):
            raise DeviceError("its own fault")

    def broken():
        backend.raises = DeviceError("broken")
        return Faulty(backend, "bad", 50)

    with pytest.raises(WorkError, match="bad failed: its own fault") as caught:
        execute(failing(backend, broken), Clock([backend]))
    assert list(map(str, caught.value.failed.values())) == ["its own fault", "broken"]


def test_work_on_a_device_that_is_not_of_the_clock_is_an_error():
    graph = Graph()
    graph.add("x", "r", action=on(FakeBackend(), "x", 1))
    with pytest.raises(WorkError, match="no device of the clock"):
        execute(graph, Clock([FakeBackend()]))


def test_an_interrupt_aborts_what_is_under_way_and_says_what_was_not_run():
    backend = FakeBackend()

    def interrupted():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        execute(failing(backend, interrupted), Clock([backend]))
    assert backend.log[-1] == "abort beside at 10"
    assert caught.value.__notes__ == ["under way: 1: beside; not run: 3: behind, 4: later"]


def test_an_interrupt_between_begin_and_return_of_an_action_aborts_what_has_begun():
    """The execution has no completion of the operation yet."""
    backend, begun, graph = FakeBackend(), [], Graph()

    def interrupted():
        begun.append(FakeWork(backend, "begun", 50))
        raise KeyboardInterrupt

    graph.add("first", "r", action=interrupted)
    execution = Execution(graph, Clock([backend]), begun)
    with pytest.raises(KeyboardInterrupt):
        execution.admit()
    assert backend.log[-1] == "abort begun at 0"
    assert begun[0].aborted


def test_work_on_a_device_is_aborted_however_often_that_is_interrupted():
    backend = FakeBackend()
    begun = []

    class Impatient(FakeWork):
        aborts = 0

        def abort(self, max_cycles=None):
            self.aborts += 1
            if self.aborts < 4:
                raise KeyboardInterrupt
            super().abort(max_cycles)

    def last():
        backend.raises = KeyboardInterrupt()
        begun.append(Impatient(backend, "bad", 5))
        return begun[0]

    with pytest.raises(KeyboardInterrupt):
        execute(failing(backend, last), Clock([backend]))
    assert backend.log[-2:] == ["abort beside at 10", "abort bad at 10"]
    assert (begun[0].aborted, begun[0].aborts) == (True, 4)


def test_an_interrupt_while_time_passes_aborts_all():
    backend = FakeBackend()

    def last():
        backend.raises = KeyboardInterrupt()
        return FakeWork(backend, "bad", 5)

    with pytest.raises(KeyboardInterrupt):
        execute(failing(backend, last), Clock([backend]))
    assert backend.log[-2:] == ["abort beside at 10", "abort bad at 10"]


def test_twenty_thousand_operations_run():
    graph = Graph()
    for number in range(20_000):
        graph.add("x", "bus", f"channel {number % 2}", seconds=PS)
    assert execute(graph).makespan == 20_000


def test_timelines_of_one_clock_are_joined_without_what_they_refer_to():
    clock = Clock()
    parts = []
    for seconds in (3, 4):
        graph = Graph()
        first = graph.add("first", "a", seconds=seconds * PS)
        graph.add("second", "b", after=[first], seconds=PS, action=lambda: None)
        parts.append(execute(graph, clock))
    joined = Timeline.joined(parts)
    assert [(e.operation.index, e.operation.needs, e.start, e.end) for e in joined.entries] == [
        (0, (), 0, 3),
        (1, (0,), 3, 4),
        (2, (), 4, 8),
        (3, (2,), 8, 9),
    ]
    assert (joined.makespan, joined.limit, joined.busy("b")) == (9, 7, 2)
    assert all(e.operation.action is None for e in joined.entries)
    assert Timeline.joined([execute(Graph())]).limit == 0


def both(backend, lasts, nbytes, **options):
    """A graph of an operation of a device and of a link."""
    graph = Graph()
    hop = Hop(link="link", direction=0, lane="link", bytes_per_s=1e9)
    over = Transfer(nbytes=nbytes, route=(hop,))
    graph.add("both", "bus", action=on(backend, "both", lasts, **options), transfer=over)
    return graph


@pytest.mark.parametrize(("lasts", "nbytes", "end"), [(10, 30, 30), (30, 10, 30), (20, 20, 20)])
def test_an_operation_of_a_device_and_links_takes_the_longer_of_both(lasts, nbytes, end):
    backend = FakeBackend()
    graph = both(backend, lasts, nbytes)
    graph.add("next", "bus", action=on(backend, "next", 5))
    first, following = execute(graph, Clock([backend], 1e9)).entries
    assert (first.start, first.end, first.cycles) == (0, end, lasts)
    assert (following.start, following.end) == (end, end + 5)


@pytest.mark.parametrize("nbytes", [10, 300])
def test_an_operation_of_a_device_and_links_fails_with_the_device(nbytes):
    backend, broken = FakeBackend(), DeviceError("broken")
    with pytest.raises(WorkError) as caught:
        execute(both(backend, 100, nbytes, error=broken), Clock([backend], 1e9))
    assert list(caught.value.failed.values()) == [broken]
