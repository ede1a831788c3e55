"""Policies of proxies: which tensors each of them starts next, as pure functions of their queues.

Ref: COARSE paper, section III-F and figure 10.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, Self


class Arrival(NamedTuple):
    """A tensor, by its number in the program, and the client that pushed it."""

    client: int
    tensor: int


class Start(NamedTuple):
    """A tensor that a proxy has started."""

    proxy: int
    tensor: int


@dataclass(frozen=True)
class QueueState:
    """What all proxies have at one moment. It does not change: each step makes another one.

    Attributes
    ----------
    arrivals : for each proxy, tensors that it has not started, in the order in which they arrived.
    under_way : what was started and is not completed on the device of its proxy, in the order of
        starts.
    completed : of tensors that other proxies have under way.
    """

    arrivals: tuple[tuple[Arrival, ...], ...]
    under_way: tuple[Start, ...] = ()
    completed: frozenset[Start] = frozenset()

    @classmethod
    def empty(cls, proxies: int) -> Self:
        """Nothing has arrived at any of so many proxies."""
        return cls(((),) * proxies)

    @property
    def proxies(self) -> range:
        return range(len(self.arrivals))

    def arrive(self, client: int, proxy: int, tensor: int) -> Self:
        """A client has pushed a tensor to a proxy."""
        arrivals = (*self.arrivals[proxy], Arrival(client, tensor))
        return replace(self, arrivals=self._with(proxy, arrivals))

    def start(self, proxy: int, tensor: int) -> Self:
        """A proxy has started a tensor that arrived there."""
        rest = tuple(each for each in self.arrivals[proxy] if each.tensor != tensor)
        under_way = (*self.under_way, Start(proxy, tensor))
        return replace(self, arrivals=self._with(proxy, rest), under_way=under_way)

    def complete(self, proxy: int, tensor: int) -> Self:
        """The device of a proxy has completed a tensor that was under way there."""
        done = Start(proxy, tensor)
        under_way = tuple(each for each in self.under_way if each != done)
        shared = {each.tensor for each in under_way}
        completed = frozenset(each for each in {*self.completed, done} if each.tensor in shared)
        return replace(self, under_way=under_way, completed=completed)

    def forget(self, tensor: int) -> Self:
        """A tensor is nowhere any more, as if it had never arrived."""
        return replace(
            self,
            arrivals=tuple(
                tuple(each for each in queue if each.tensor != tensor) for queue in self.arrivals
            ),
            under_way=tuple(each for each in self.under_way if each.tensor != tensor),
            completed=frozenset(each for each in self.completed if each.tensor != tensor),
        )

    def absent(self, tensor: int) -> tuple[int, ...]:
        """Proxies that have not started a tensor, one that is under way."""
        started = {each.proxy for each in self.under_way if each.tensor == tensor}
        started |= {each.proxy for each in self.completed if each.tensor == tensor}
        return tuple(proxy for proxy in self.proxies if proxy not in started)

    def _with(self, proxy: int, arrivals: tuple[Arrival, ...]) -> tuple[tuple[Arrival, ...], ...]:
        return (*self.arrivals[:proxy], arrivals, *self.arrivals[proxy + 1 :])


Policy = Callable[[QueueState], tuple[tuple[int, ...], ...]]
"""For each proxy, the tensors that it starts next, in this order: none, if it has to wait."""


def queue_per_client(state: QueueState) -> tuple[tuple[int, ...], ...]:
    """Each proxy has a queue for each client; what is at the head of one everywhere starts.

    All proxies start the same tensors in the same order, that of the program, so none waits for
    another. And all tensors start: of those that every proxy has got and that are not started, take
    the first of the program. A client pushes in the order of the program, so what is before it in a
    queue is earlier in the program; if every proxy has got that, too, it has been started.
    """
    common = set.intersection(*map(_heads, state.arrivals))
    return (tuple(sorted(common)),) * len(state.arrivals)


def first_come_first_served(state: QueueState) -> tuple[tuple[int, ...], ...]:
    """A proxy starts the tensor that arrived first, when it has none under way.

    Proxies at which tensors arrive in different orders can wait for each other for ever.
    """
    busy = {each.proxy for each in state.under_way}
    return tuple(
        (arrivals[0].tensor,) if arrivals and proxy not in busy else ()
        for proxy, arrivals in enumerate(state.arrivals)
    )


def waits(state: QueueState) -> Mapping[int, tuple[int, ...]]:
    """For each proxy with a tensor under way, in the order of starts, the proxies that it waits
    for: those that have not started this tensor."""
    found: dict[int, tuple[int, ...]] = {}
    for proxy, tensor in state.under_way:
        found[proxy] = (*found.get(proxy, ()), *state.absent(tensor))
    return found


def deadlock(state: QueueState) -> tuple[int, ...]:
    """Proxies of which each waits for the next, and the last for the first; none without a
    deadlock.

    Of policies under which a proxy has one tensor under way at a time.

    A proxy waits for all that have not started its tensor; those of them that wait themselves have
    another one under way, so of any circle two wait for each other.
    """
    waiting = waits(state)
    for proxy, peers in waiting.items():
        for peer in peers:
            if proxy in waiting.get(peer, ()):
                return (proxy, peer)
    return ()


def _heads(arrivals: tuple[Arrival, ...]) -> set[int]:
    """The first tensor in the queue of each client."""
    first: dict[int, int] = {}
    for client, tensor in arrivals:
        first.setdefault(client, tensor)
    return {*first.values()}
