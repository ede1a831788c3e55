"""First come, first served: proxies of a service that can wait for each other for ever."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

from nearstep.coarse.policies import QueueState, Start, first_come_first_served

Key = TypeVar("Key", bound=Hashable)


class ArrivalOrder(Generic[Key]):
    """Each proxy takes the shard that came to it first, and no other until that has been summed.

    A shard can be summed when all its clients have pushed it and every proxy that they push it to
    has taken it. What other clients push of a shard that a proxy has taken does not wait there.

    Parameters
    ----------
    proxies : how many there are.

    Ref: COARSE paper, section III-F and figure 10.
    """

    def __init__(self, proxies: int) -> None:
        self._state = QueueState.empty(proxies)
        self._numbers: dict[Key, int] = {}
        self._shards: dict[int, Key] = {}
        self._places: dict[int, Sequence[int]] = {}
        self._missing: dict[int, int] = {}
        self._next = 0

    def push(self, shard: Key, client: int, places: Sequence[int]) -> list[Key]:
        """A client pushes a shard; which ones can be summed now.

        Parameters
        ----------
        shard
        client : number of one of those that push it.
        places : proxy of each client of the shard.
        """
        number = self._numbers.get(shard)
        if number is None:
            number, self._next = self._next, self._next + 1
            self._numbers[shard], self._shards[number] = number, shard
            self._places[number] = places
            self._missing[number] = len(places)
        self._missing[number] -= 1
        proxy = places[client]
        if Start(proxy, number) not in self._state.under_way:
            self._state = self._state.arrive(client, proxy, number)
        return self._start()

    def complete(self, shard: Hashable) -> list[Key]:
        """A shard has been summed: its proxies take the next ones. Which can be summed now."""
        return self.drop(lambda each: each == shard)

    def drop(self, belongs: Callable[[Key], bool]) -> list[Key]:
        """Forget shards, wherever they are. Which others can be summed now."""
        for shard in [each for each in self._numbers if belongs(each)]:
            number = self._numbers.pop(shard)
            del self._shards[number], self._places[number], self._missing[number]
            self._state = self._state.forget(number)
        return self._start()

    @property
    def waits(self) -> Mapping[int, tuple[int, ...]]:
        """For each proxy that has taken a shard, the proxies that have to take it and hold another
        one."""
        held = self._held
        found: dict[int, tuple[int, ...]] = {}
        for proxy, number in held.items():
            needed = sorted(set(self._places[number]))
            found[proxy] = tuple(each for each in needed if held.get(each, number) != number)
        return found

    def deadlock(self) -> tuple[tuple[int, ...], tuple[Key, ...]]:
        """Proxies of which each waits for the next, and the shards that they hold.

        The last one waits for the first. Nothing without a deadlock; of several circles one of the
        shortest.
        """
        waits = self.waits
        circles = (circle for proxy in sorted(waits) if (circle := _circle(waits, proxy)))
        shortest = min(circles, key=len, default=())
        return shortest, tuple(self._shards[self._held[proxy]] for proxy in shortest)

    @property
    def _held(self) -> dict[int, int]:
        """What each proxy has taken."""
        return dict(self._state.under_way)

    def _start(self) -> list[Key]:
        """Have idle proxies take what is first in their queues; what can be summed now."""
        for proxy, chosen in enumerate(first_come_first_served(self._state)):
            for number in chosen:
                self._state = self._state.start(proxy, number)
        held = self._held
        return [
            self._shards[number]
            for number in dict.fromkeys(held.values())
            if not self._missing[number]
            and all(held.get(proxy) == number for proxy in self._places[number])
        ]


def _circle(waits: Mapping[int, tuple[int, ...]], first: int) -> tuple[int, ...]:
    """The shortest way from a proxy over those that each waits for back to it; empty without."""
    before: dict[int, int] = {}
    waiting = deque([first])
    while waiting:
        proxy = waiting.popleft()
        for peer in waits.get(proxy, ()):
            if peer == first:
                way = [proxy]
                while way[-1] != first:
                    way.append(before[way[-1]])
                return tuple(reversed(way))
            if peer not in before:
                before[peer] = proxy
                waiting.append(peer)
    return ()
