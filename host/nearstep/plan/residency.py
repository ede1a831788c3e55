"""Which arrays lie in memory, and which give way to others and lie on drives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from nearstep.errors import ArgumentError, Fielded, NearstepError


class Movable(Protocol):
    """What lies in memory or on drives, as a whole. It can be hashed."""

    @property
    def nbytes(self) -> int:
        """That it takes in memory."""

    @property
    def transient(self) -> bool:
        """Whether it is given up where other arrays are written: a gradient."""


AnyItem = TypeVar("AnyItem", bound=Movable)


class NoRoomError(Fielded, NearstepError):
    """The arrays needed at once do not fit into the memory of a channel, in bytes."""

    template = "channel {channel}: {expected} bytes are needed at once, there are {actual}"
    channel: int
    expected: int
    actual: int


class Candidate(NamedTuple, Generic[AnyItem]):
    """An array that could give way.

    Attributes
    ----------
    updated : whether it has been updated in this iteration; a gradient, whether it was used.
    used : when it was last used: larger is later.
    """

    item: AnyItem
    updated: bool
    used: int


Policy = Callable[[Sequence[Candidate[AnyItem]], int], AnyItem]
"""Chooses what gives way, of at least one candidate, at a position in the order of uses."""


def updated_first(candidates: Sequence[Candidate[AnyItem]], now: int) -> AnyItem:
    """Gradients that were used; what this iteration has updated, the longest unused first (AXDIMM,
    section 5.3); then what was used last, since backward comes to that last."""
    done = [each for each in candidates if each.updated]
    if done:
        return min(done, key=lambda each: (not each.item.transient, each.used)).item
    return max(candidates, key=lambda each: each.used).item


def belady(uses: Mapping[AnyItem, Sequence[int]], length: int) -> Policy[AnyItem]:
    """What is used next the furthest ahead, in an order of uses that repeats: no policy evicts less
    (Belady, 1966; of arrays of equal size).

    Parameters
    ----------
    uses : positions of each array, ascending, from 0; what has none is not used again.
    length : positions of an iteration.
    """

    def choose(candidates: Sequence[Candidate[AnyItem]], now: int) -> AnyItem:
        def distance(item: AnyItem) -> int:
            here = now % length
            return min(((each - here - 1) % length for each in uses.get(item, ())), default=length)

        return max((each.item for each in candidates), key=distance)

    return choose


class Residency(Generic[AnyItem]):
    """Arrays in the memory of one channel. What is in neither list lies on drives alone.

    An array that has not been changed since it came from a drive need not be written back.

    Parameters
    ----------
    capacity : bytes.

    Attributes
    ----------
    peak : most bytes that were in use.
    """

    def __init__(self, channel: int, capacity: int, policy: Policy[AnyItem]) -> None:
        if capacity < 0:
            raise ArgumentError(f"capacity must be at least 0, not {capacity}")
        self.channel = channel
        self.capacity = capacity
        self.peak = 0
        self._policy = policy
        self._held: dict[AnyItem, int] = {}  # and when each was last used
        self._changed: set[AnyItem] = set()
        self._updated: set[AnyItem] = set()
        self._time = 0
        self._bytes = 0

    @property
    def free(self) -> int:
        """Bytes that nothing is in."""
        return self.capacity - self._bytes

    def __contains__(self, item: AnyItem) -> bool:
        return item in self._held

    def make_room(self, items: Iterable[AnyItem], now: int) -> list[tuple[AnyItem, bool]]:
        """Hold arrays together, with room for those that are not here.

        Parameters
        ----------
        now : position in the order of uses.

        Returns
        -------
        list[tuple[AnyItem, bool]] : what gives way, in order, and whether it has to be written.

        Raises
        ------
        NoRoomError : nothing has given way.
        """
        kept = dict.fromkeys(items)
        missing = [item for item in kept if item not in self._held]
        needed = sum(item.nbytes for item in missing)
        together = sum(item.nbytes for item in kept)
        if together > self.capacity:
            raise NoRoomError(self.channel, together, self.capacity)
        gone: list[tuple[AnyItem, bool]] = []
        while self._bytes + needed > self.capacity:
            candidates = [
                Candidate(item, item in self._updated, used)
                for item, used in self._held.items()
                if item not in kept
            ]
            item = self._policy(candidates, now)
            del self._held[item]
            self._bytes -= item.nbytes
            gone.append((item, item in self._changed))
            self._changed.discard(item)
            self._updated.discard(item)
        for item in missing:
            self._held[item] = self._time
            self._bytes += item.nbytes
        self.peak = max(self.peak, self._bytes)
        return gone

    def use(self, item: AnyItem, *, updated: bool = False) -> None:
        """An array here is used, and changed if it is `updated`."""
        self._time += 1
        self._held[item] = self._time
        if updated:
            self._updated.add(item)
            if not item.transient:
                self._changed.add(item)

    def change(self, item: AnyItem) -> None:
        """An array here differs from what the drives have."""
        self._changed.add(item)

    def written(self) -> list[AnyItem]:
        """All that is changed, in the order in which it was used: from now on the drives have it
        as well."""
        found = [item for item in self._held if item in self._changed]
        self._changed.clear()
        return sorted(found, key=self._held.__getitem__)

    def end_iteration(self) -> None:
        """What was updated has been so in the iteration before; what was used up still is."""
        self._updated = {item for item in self._updated if item.transient}
