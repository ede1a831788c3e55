"""First come, first served: a scheduler whose proxies can deadlock."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class ArrivalOrder(Generic[Key]):
    """Each proxy holds the first shard of its queue until that shard has been summed.

    A shard can be summed when all its clients have pushed it and every proxy that they push it to
    holds it. Later pushes of a held shard are accepted at once.

    Parameters
    ----------
    proxies : number of proxies.

    Ref: COARSE paper, section III-F and figure 10.
    """

    def __init__(self, proxies: int) -> None:
        self._queues: list[list[Key]] = [[] for _ in range(proxies)]
        self._held: dict[int, Key] = {}
        self._places: dict[Key, Sequence[int]] = {}
        self._missing: dict[Key, int] = {}

    def push(self, shard: Key, client: int, places: Sequence[int]) -> list[Key]:
        """Queue a client's push of a shard; return the shards that can be summed now.

        Parameters
        ----------
        client : index of the client in `places`.
        places : proxy of each client of the shard.
        """
        self._places.setdefault(shard, places)
        self._missing[shard] = self._missing.get(shard, len(places)) - 1
        proxy = places[client]
        if self._held.get(proxy) != shard and shard not in self._queues[proxy]:
            self._queues[proxy].append(shard)
        return self._start()

    def complete(self, shard: Key) -> list[Key]:
        """Release a summed shard's proxies; return as `push`."""
        return self.drop(lambda each: each == shard)

    def drop(self, belongs: Callable[[Key], bool]) -> list[Key]:
        """Drop shards from proxies and queues; return as `push`."""
        for shard in [each for each in self._places if belongs(each)]:
            del self._places[shard], self._missing[shard]
        known = self._places.keys()
        self._queues = [[each for each in queue if each in known] for queue in self._queues]
        self._held = {proxy: each for proxy, each in self._held.items() if each in known}
        return self._start()

    @property
    def waits(self) -> Mapping[int, tuple[int, ...]]:
        """For each proxy with a held shard, the proxies that need the shard and hold another
        one."""
        held = self._held
        return {
            proxy: tuple(
                each for each in sorted({*self._places[shard]}) if held.get(each, shard) != shard
            )
            for proxy, shard in held.items()
        }

    def deadlock(self) -> tuple[tuple[int, ...], tuple[Key, ...]]:
        """Return proxies of which each waits for the next, and the shards that they hold.

        The last proxy waits for the first. Empty without a deadlock; of several circles, one of the
        shortest is returned.
        """
        waits = self.waits
        circles = (circle for proxy in sorted(waits) if (circle := _circle(waits, proxy)))
        shortest = min(circles, key=len, default=())
        return shortest, tuple(self._held[proxy] for proxy in shortest)

    def _start(self) -> list[Key]:
        """Assign each idle proxy the first shard of its queue; return the shards that can be
        summed."""
        for proxy, queue in enumerate(self._queues):
            if queue and proxy not in self._held:
                self._held[proxy] = queue.pop(0)
        return [
            shard
            for shard in dict.fromkeys(self._held.values())
            if not self._missing[shard]
            and all(self._held.get(proxy) == shard for proxy in self._places[shard])
        ]


def _circle(waits: Mapping[int, tuple[int, ...]], first: int) -> tuple[int, ...]:
    """Return the shortest circle of waiting proxies through `first`, or nothing."""
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
