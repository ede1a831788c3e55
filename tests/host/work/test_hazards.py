"""Needs that follow from byte ranges, against a comparison of all pairs."""

from __future__ import annotations

import networkx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nearstep.errors import ArgumentError
from nearstep.work.graph import Graph
from nearstep.work.operation import Range

from .fakes import conflict, random_graph


def needs(*operations):
    """The needs that follow for operations of (reads, writes) in one space."""
    graph = Graph()
    for reads, writes in operations:
        reads, writes = ([Range("a", *each) for each in given] for given in (reads, writes))
        graph.add("x", "r", reads=reads, writes=writes, seconds=0)
    return [operation.needs for operation in graph]


@pytest.mark.parametrize(
    ("first", "second", "found"),
    [
        (([], [(0, 8)]), ([(4, 5)], []), True),
        (([(0, 8)], []), ([], [(4, 5)]), True),
        (([], [(0, 8)]), ([], [(7, 9)]), True),
        (([(0, 8)], []), ([(0, 8)], []), False),
        (([], [(0, 8)]), ([(8, 16)], [(8, 16)]), False),
        (([], [(4, 4)]), ([(0, 8)], [(0, 8)]), False),
        (([], [(0, 8)]), ([(4, 4)], [(4, 4)]), False),
    ],
    ids=["raw", "war", "waw", "reads", "neighbours", "empty first", "empty second"],
)
def test_two_operations(first, second, found):
    assert needs(first, second)[1] == ((0,) if found else ())


def test_an_operation_that_changes_bytes_in_place_does_not_need_itself():
    both = ([(0, 8), (0, 8)], [(0, 8), (4, 6)])
    assert needs(both, both) == [(), (0,)]


def test_only_the_nearest_hazards_are_told():
    write, read = ([], [(0, 8)]), ([(0, 8)], [])
    assert needs(write, read, read, write, write) == [(), (0,), (0,), (0, 1, 2), (3,)]


def test_spaces_are_apart():
    graph = Graph()
    graph.add("x", "r", writes=[Range("a", 0, 8)], seconds=0)
    assert graph.add("y", "r", writes=[Range("b", 0, 8)], seconds=0).needs == ()


@settings(max_examples=200, deadline=None, derandomize=True)
@given(seed=st.integers(0, 1 << 32), count=st.integers(0, 40))
def test_every_pair_that_conflicts_is_ordered_and_every_need_is_a_conflict(seed, count):
    graph = random_graph(seed, count)
    order = networkx.DiGraph([(need, each.index) for each in graph for need in each.needs])
    order.add_nodes_from(range(count))
    closure = networkx.transitive_closure_dag(order)
    for later in graph:
        for earlier in graph[: later.index]:
            if conflict(earlier, later):
                assert closure.has_edge(earlier.index, later.index)
    bare = Graph()
    for each in graph:  # without the needs that are named
        bare.add("x", "r", reads=each.reads, writes=each.writes, seconds=0)
    for each in bare:
        assert all(conflict(bare[need], each) for need in each.needs)


def test_the_comparison_of_pairs_trips_on_a_graph_without_hazards():
    graph = random_graph(3, 40)
    assert sum(conflict(a, b) for b in graph for a in graph[: b.index]) > 100


def test_many_operations_leave_as_many_needs_as_neighbours():
    graph = Graph()
    for i in range(20_000):
        here, then = (Range("a", 64 * at, 64 * at + 64) for at in (i, i + 1))
        graph.add("x", "r", reads=[here], writes=[then], seconds=0)
    assert sum(len(each.needs) for each in graph) == 19_999


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"holds": ()}, "holds must be"),
        ({"holds": ("r", "r")}, "holds must be"),
        ({"reads": [Range("a", 2, 1)]}, "0 <= start <= stop"),
        ({"writes": [Range("a", -1, 1)]}, "0 <= start <= stop"),
        ({"writes": [Range("a", 0, 1.5)]}, "0 <= start <= stop"),
        ({"seconds": None}, "action, seconds or transfer"),
        ({"seconds": -1.0}, "from 0 and finite"),
        ({"seconds": float("nan")}, "from 0 and finite"),
        ({"priority": 0.5}, "priority must be an integer"),
    ],
)
def test_what_cannot_be_added_changes_nothing(options, message):
    graph = Graph()
    options = {"holds": ("r",), "seconds": 0.0, "writes": [Range("a", 0, 8)], **options}
    with pytest.raises(ArgumentError, match=message):
        graph.add("x", *options.pop("holds"), **options)
    assert len(graph) == 0
    assert graph.add("y", "r", reads=[Range("a", 0, 8)], seconds=0).needs == ()


def test_an_operation_needs_those_of_its_own_graph_alone():
    graph, other = Graph(), Graph()
    graph.add("x", "r", seconds=0)
    foreign = other.add("x", "r", seconds=0)
    with pytest.raises(ArgumentError, match="operations of this graph"):
        graph.add("y", "r", after=[foreign], seconds=0)
    foreign = [other.add("z", "r", seconds=0) for _ in range(3)][-1]
    with pytest.raises(ArgumentError, match="operations of this graph"):
        graph.add("y", "r", after=[foreign], seconds=0)
    assert len(graph) == 1
