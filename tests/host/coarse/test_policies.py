"""Policies of proxies by themselves, on a model of the devices: who starts what, and who waits."""

from __future__ import annotations

import random
from collections import Counter

import networkx as nx
from hypothesis import given, settings
from hypothesis import strategies as st

from nearstep.coarse.policies import (
    Arrival,
    Policy,
    QueueState,
    Start,
    deadlock,
    first_come_first_served,
    queue_per_client,
    waits,
)

from .programs import FIGURE_10, Program, programs

same_each_time = settings(max_examples=200, deadline=None, derandomize=True, database=None)


class Devices:
    """What devices do with the tensors that a policy starts on them, at random times.

    It keeps a record of its own, so that what a state says can be compared with it.
    """

    def __init__(self, proxies: int, policy: Policy, seed: int) -> None:
        self.policy = policy
        self.chance = random.Random(seed)
        self.state = QueueState.empty(proxies)
        self.arrived: list[list[int]] = [[] for _ in range(proxies)]
        self.started: list[list[int]] = [[] for _ in range(proxies)]
        self.completed: list[set[int]] = [set() for _ in range(proxies)]

    def arrive(self, client: int, proxy: int, tensor: int) -> None:
        self.arrived[proxy].append(tensor)
        self.state = self.state.arrive(client, proxy, tensor)

    def step(self) -> bool:
        """Start what the policy chooses; some devices complete what every one has started.

        Whether there was anything to do.
        """
        chosen = self.policy(self.state)
        assert chosen == self.policy(self.state)
        for proxy, tensors in enumerate(chosen):
            for tensor in tensors:
                self.started[proxy].append(tensor)
                self.state = self.state.start(proxy, tensor)
        everywhere = set.intersection(*map(set, self.started))
        ready = [
            (proxy, tensor)
            for proxy, completed in enumerate(self.completed)
            for tensor in sorted(everywhere - completed)
        ]
        for proxy, tensor in self.chance.sample(ready, self.chance.randint(0, len(ready))):
            self.completed[proxy].add(tensor)
            self.state = self.state.complete(proxy, tensor)
        return bool(ready) or any(chosen)

    def waiting(self) -> nx.DiGraph[int]:
        """Which proxy waits for which, from the record alone."""
        graph: nx.DiGraph[int] = nx.DiGraph()
        for proxy, started in enumerate(self.started):
            for tensor in set(started) - self.completed[proxy]:
                absent = [peer for peer, other in enumerate(self.started) if tensor not in other]
                graph.add_edges_from((proxy, peer) for peer in absent)
        return graph

    def check(self) -> int:
        """Assert that the state says what the record does, and give the number of waits."""
        for proxy, started in enumerate(self.started):
            rest = [tensor for tensor in self.arrived[proxy] if tensor not in started]
            assert [each.tensor for each in self.state.arrivals[proxy]] == rest
            under_way = [tensor for tensor in started if tensor not in self.completed[proxy]]
            assert [each.tensor for each in self.state.under_way if each.proxy == proxy] == (
                under_way
            )
        graph = self.waiting()
        edges = {(proxy, peer) for proxy, peers in waits(self.state).items() for peer in peers}
        assert edges == set(graph.edges)
        return len(edges)


def play(devices: Devices, program: Program) -> None:
    """Push the program, while the devices are at work, and let them go on until nothing moves."""
    for number, push in enumerate(program.pushes):
        if number in program.stops or devices.chance.random() < 0.3:
            devices.step()
            devices.check()
        devices.arrive(*push)
    while devices.step():
        devices.check()


@same_each_time
@given(data=st.data(), count=st.integers(2, 5), seed=st.integers(0, 1 << 32))
def test_queues_start_every_tensor_once_and_in_one_order_everywhere(data, count, seed) -> None:
    program = data.draw(programs(devices=count))
    devices = Devices(count, queue_per_client, seed)

    def policy(state: QueueState) -> tuple[tuple[int, ...], ...]:
        chosen = queue_per_client(state)
        assert len(chosen) == count
        assert len(set(chosen)) == 1
        return chosen

    devices.policy = policy
    play(devices, program)
    assert devices.check() == 0
    assert all(each == devices.started[0] for each in devices.started)
    assert sorted(devices.started[0]) == list(range(program.tensors))
    assert all(each == set(range(program.tensors)) for each in devices.completed)
    assert devices.state == QueueState.empty(count)


@same_each_time
@given(program=programs(devices=3))
def test_queues_start_what_is_at_the_head_of_a_queue_everywhere(program) -> None:
    """Compared with queues that are really kept, at any moment of the arrivals."""
    state = QueueState.empty(3)
    kept: list[dict[int, list[int]]] = [{} for _ in range(3)]
    for client, proxy, tensor in program.pushes:
        state = state.arrive(client, proxy, tensor)
        kept[proxy].setdefault(client, []).append(tensor)
        heads = [{queue[0] for queue in queues.values()} for queues in kept]
        expected = tuple(t for t in range(program.tensors) if all(t in each for each in heads))
        assert queue_per_client(state) == (expected,) * 3


def test_first_come_first_served_stands_still_where_orders_of_arrival_differ() -> None:
    """Two detectors know nothing of the policy: a circle in the graph of waits, and that proxies
    which serve in order of arrival can all get on only if that order is the same everywhere."""
    outcomes: Counter[str] = Counter()

    @same_each_time
    @given(data=st.data(), count=st.integers(2, 4), seed=st.integers(0, 1 << 32))
    def each(data, count, seed) -> None:
        program = data.draw(programs(devices=count))
        devices = Devices(count, first_come_first_served, seed)
        play(devices, program)
        devices.check()
        graph = devices.waiting()
        circle = deadlock(devices.state)
        assert bool(circle) == (not nx.is_directed_acyclic_graph(graph))
        assert bool(circle) == any(order != devices.arrived[0] for order in devices.arrived)
        for proxy, peer in zip(circle, circle[1:] + circle[:1], strict=True):
            assert graph.has_edge(proxy, peer)
        finished = all(done == set(range(program.tensors)) for done in devices.completed)
        assert finished == (not circle)
        assert all(len(set(started)) == len(started) for started in devices.started)
        outcomes["deadlock" if circle else "finished"] += 1

    each()
    print(dict(outcomes))
    assert outcomes["deadlock"] >= 20, outcomes
    assert outcomes["finished"] >= 20, outcomes


@same_each_time
@given(program=programs(devices=3), seed=st.integers(0, 1 << 32))
def test_a_deadlock_is_none_before_proxies_wait_for_each_other(program, seed) -> None:
    devices = Devices(3, first_come_first_served, seed)
    for push in program.pushes:
        devices.arrive(*push)
        devices.step()
        devices.check()
        acyclic = nx.is_directed_acyclic_graph(devices.waiting())
        assert bool(deadlock(devices.state)) == (not acyclic)


def test_figure_10() -> None:
    state = QueueState.empty(2)
    for push in FIGURE_10:
        state = state.arrive(*push)
    assert state.arrivals == (
        (Arrival(client=0, tensor=0), Arrival(client=1, tensor=1)),
        (Arrival(client=0, tensor=1), Arrival(client=1, tensor=0)),
    )
    assert queue_per_client(state) == ((0, 1), (0, 1))
    assert first_come_first_served(state) == ((0,), (1,))
    stuck = state.start(0, 0).start(1, 1)
    assert stuck.under_way == (Start(proxy=0, tensor=0), Start(proxy=1, tensor=1))
    assert first_come_first_served(stuck) == ((), ())
    assert waits(stuck) == {0: (1,), 1: (0,)}
    assert deadlock(stuck) == (0, 1)
    assert deadlock(state) == deadlock(state.start(0, 0)) == ()
