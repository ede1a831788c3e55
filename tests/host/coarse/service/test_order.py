"""Proxies that serve what came first: what they sum, and how a deadlock of them ends."""

from __future__ import annotations

from collections import Counter

import networkx as nx
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from nearstep.coarse.routing import RoutingTable
from nearstep.coarse.service import Client, Server
from nearstep.coarse.service.errors import ProxyDeadlockError
from nearstep.coarse.service.order import ArrivalOrder
from nearstep.errors import ArgumentError

from .conftest import put_in, taken_from

ELEMENTS = 2048  # of two shards


class Played:
    """Pushes in some order, and what a record that is kept apart says of them."""

    def __init__(self, proxies: int, places: list[list[int]]) -> None:
        self.order: ArrivalOrder[int] = ArrivalOrder(proxies)
        self.places = places
        self.queues: list[list[int]] = [[] for _ in range(proxies)]
        self.pushed: Counter[int] = Counter()
        self.summed: list[int] = []
        self.ready: list[int] = []

    def push(self, client: int, shard: int) -> None:
        self.pushed[shard] += 1
        queue = self.queues[self.places[shard][client]]
        if shard not in queue:
            queue.append(shard)
        self.ready = self.order.push(shard, client, self.places[shard])
        self.check()

    def sum(self, shard: int) -> None:
        self.summed.append(shard)
        for queue in self.queues:
            if shard in queue:
                assert queue.pop(0) == shard
        self.ready = self.order.complete(shard)
        self.check()

    def check(self) -> None:
        """A shard can be summed if it was pushed by all and is the first at all its proxies."""
        first = [
            shard
            for shard, places in enumerate(self.places)
            if shard not in self.summed
            and self.pushed[shard] == len(places)
            and all(self.queues[proxy][:1] == [shard] for proxy in places)
        ]
        assert sorted(self.ready) == first

    def graph(self) -> nx.DiGraph[int]:
        graph: nx.DiGraph[int] = nx.DiGraph()
        for proxy, queue in enumerate(self.queues):
            for peer in self.places[queue[0]] if queue else ():
                if self.queues[peer] and self.queues[peer][0] != queue[0]:
                    graph.add_edge(proxy, peer)
        return graph


def test_all_is_summed_or_a_circle_is_found_in_random_arrivals() -> None:
    outcomes: Counter[str] = Counter()

    @settings(
        max_examples=100,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],  # other work on the machine, perhaps
    )
    @given(data=st.data(), proxies=st.integers(1, 4), clients=st.integers(1, 4))
    def each(data: st.DataObject, proxies: int, clients: int) -> None:
        shards = data.draw(st.integers(1, 5))
        places = [
            data.draw(st.lists(st.integers(0, proxies - 1), min_size=clients, max_size=clients))
            for _ in range(shards)
        ]
        pushes = [(client, shard) for client in range(clients) for shard in range(shards)]
        played = Played(proxies, places)
        stuck: set[int] = set()
        for push in data.draw(st.permutations(pushes)):
            played.push(*push)
            while played.ready and data.draw(st.booleans()):
                played.sum(data.draw(st.sampled_from(sorted(played.ready))))
            circle, held = played.order.deadlock()
            graph = played.graph()
            assert bool(circle) == (not nx.is_directed_acyclic_graph(graph))
            for proxy, peer in zip(circle, circle[1:] + circle[:1], strict=True):
                assert graph.has_edge(proxy, peer)
            assert [played.queues[proxy][0] for proxy in circle] == list(held)
            stuck.update(held)
        while played.ready:
            played.sum(played.ready[0])
        stuck.update(played.order.deadlock()[1])
        assert not stuck & set(played.summed), "what is in a circle is never summed"
        assert bool(stuck) == (len(played.summed) < shards)
        outcomes["deadlock" if stuck else "summed"] += 1

    each()
    print(dict(outcomes))
    assert outcomes["deadlock"] >= 20, outcomes
    assert outcomes["summed"] >= 20, outcomes


def test_a_circle_of_three_is_found_and_what_is_dropped_frees_the_others() -> None:
    order: ArrivalOrder[str] = ArrivalOrder(3)
    for shard, proxy in (("a", 0), ("b", 1), ("c", 2)):
        assert order.push(shard, 0, [proxy, (proxy + 1) % 3]) == []
        assert bool(order.deadlock()[0]) == (shard == "c")
    assert order.deadlock() == ((0, 1, 2), ("a", "b", "c"))
    assert order.push("a", 1, [0, 1]) == order.push("b", 1, [1, 2]) == []
    assert order.drop(lambda shard: shard == "c") == ["b"]
    assert order.deadlock() == ((), ())
    assert order.complete("b") == ["a"]
    assert order.complete("a") == []


def crossed(client: Client) -> float:
    """Each of two clients pushes first what the other one pushes last."""
    exchange = client.exchange(ELEMENTS)
    put_in(exchange, 1 + client.rank)
    exchange.begin()
    first = client.rank
    exchange.push(first)
    client.barrier()
    exchange.push(1 - first)
    for shard in (0, 1):
        exchange.wait(shard)
    return float(taken_from(exchange).sum())


def test_queues_sum_what_ends_in_a_deadlock_of_first_come_first_served(serve) -> None:
    assert serve(2).run(2, crossed) == [3.0 * ELEMENTS] * 2

    service = serve(2, scheduler="fcfs")

    def caught(client: Client) -> tuple[tuple[int, ...], str]:
        with pytest.raises(ProxyDeadlockError) as found:
            crossed(client)
        return found.value.devices, str(found.value)

    for devices, text in service.run(2, caught):
        assert devices == (0, 1)
        assert "that of device 0 has shard 0 of exchange 0" in text
        assert "that of device 1 has shard 1" in text
    service.wait_idle()
    assert service.run(2, in_order) == [True] * 2
    service.wait_idle()


def in_order(client: Client) -> bool:
    """Sums of several tensors in the order of the program, again and again."""
    exchanges = [client.exchange(size) for size in (ELEMENTS, 5000, 1)]
    for number in range(4):
        for each in exchanges:
            array = np.full(each.elements, number + client.rank, np.float32)
            out = np.empty_like(array)
            each.reduce(array, out)
            wanted = client.clients * number + sum(range(client.clients))
            if not (out == wanted).all():
                return False
    return True


@pytest.mark.parametrize("clients", [1, 2, 3, 5])
def test_first_come_first_served_sums_what_comes_in_the_order_of_the_program(
    serve, clients
) -> None:
    service = serve(2, scheduler="fcfs", shard_bytes=4096)
    assert service.run(clients, in_order) == [True] * clients
    service.wait_idle()


def test_tables_of_clients_can_cross_each_other_too(serve) -> None:
    """One client pushes small tensors to device 0 and large ones to device 1; the other one does
    the reverse (figure 10)."""
    service = serve(2, scheduler="fcfs")

    def action(client: Client) -> tuple[int, ...]:
        proxies = (0, 1) if client.rank == 0 else (1, 0)
        client.routing = RoutingTable(
            threshold_bytes=100, latency_proxy=proxies[0], bandwidth_proxy=proxies[1]
        )
        small, large = client.exchange(8), client.exchange(512)
        for each in (small, large):
            each.begin()
        if client.rank == 0:
            small.push(0)
            large.push(0)
        with pytest.raises(ProxyDeadlockError) as found:
            small.wait(0)
        return found.value.devices

    assert service.run(2, action) == [(0, 1)] * 2
    service.wait_idle()


def test_a_deadlock_of_two_jobs_ends_those_and_no_other(serve) -> None:
    service = serve(4, scheduler="fcfs")
    assert service.run(2, in_order) == [True] * 2

    def stuck(client: Client) -> bool:
        with pytest.raises(ProxyDeadlockError):
            crossed(client)
        return True

    for _ in range(3):
        assert service.run(2, stuck) == [True] * 2
        service.wait_idle()
    assert service.run(3, in_order) == [True] * 3


def test_there_are_two_ways_to_serve() -> None:
    with pytest.raises(ArgumentError, match="queues, fcfs, not 'lifo'"):
        Server(None, "unix:/nowhere", "a", scheduler="lifo")  # type: ignore[arg-type]
