"""Residency: which arrays are in memory, and which are evicted to drives."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

from nearstep.errors import ArgumentError, Fielded, NearstepError


class Movable(Protocol):
    """A hashable array that is in memory or on drives as a whole."""

    @property
    def nbytes(self) -> int:
        """Bytes in memory."""

    @property
    def transient(self) -> bool:
        """Whether the array is dropped, not written, on eviction: a gradient."""


AnyItem = TypeVar("AnyItem", bound=Movable)


class NoRoomError(Fielded, NearstepError):
    """The arrays needed at once do not fit into the memory of a channel, in bytes."""

    template = "channel {channel}: {expected} bytes are needed at once, there are {actual}"
    channel: int
    expected: int
    actual: int


class Candidate(NamedTuple, Generic[AnyItem]):
    """An array that could be evicted.

    Attributes
    ----------
    updated : whether this iteration has updated the array; for a gradient, whether it was used.
    used : time of the last use.
    """

    item: AnyItem
    updated: bool
    used: int


Policy = Callable[[Sequence[Candidate[AnyItem]], int], AnyItem]
"""Choose the array to evict, of at least one candidate, at a position in the order of uses."""


def updated_first(candidates: Sequence[Candidate[AnyItem]], now: int) -> AnyItem:
    """Choose used gradients; then arrays updated in this iteration, the least recently used first
    (AXDIMM, section 5.3); then the most recently used one, which backward needs last.
    """
    done = [each for each in candidates if each.updated]
    if done:
        return min(done, key=lambda each: (not each.item.transient, each.used)).item
    return max(candidates, key=lambda each: each.used).item


def belady(uses: Mapping[AnyItem, Sequence[int]], length: int) -> Policy[AnyItem]:
    """Policy that evicts the array whose next use is furthest ahead, in a repeated order of uses:
    optimal for arrays of equal size (Belady, 1966).

    Parameters
    ----------
    uses : positions of each array, ascending, from 0; an array without positions is not used again.
    length : positions of an iteration.
    """

    def choose(candidates: Sequence[Candidate[AnyItem]], now: int) -> AnyItem:
        def distance(item: AnyItem) -> int:
            here = now % length
            return min(((each - here - 1) % length for each in uses.get(item, ())), default=length)

        return max((each.item for each in candidates), key=distance)

    return choose


class Residency(Generic[AnyItem]):
    """Arrays in the memory of one channel; all others are on drives.

    An array that has not been changed since it was read from a drive need not be written back.

    Parameters
    ----------
    capacity : of the memory, in bytes.

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
        """Free bytes."""
        return self.capacity - self._bytes

    def __contains__(self, item: AnyItem) -> bool:
        return item in self._held

    def make_room(self, items: Iterable[AnyItem], now: int) -> list[tuple[AnyItem, bool]]:
        """Hold arrays together, and evict others to make room for those that are missing.

        Parameters
        ----------
        now : position in the order of uses.

        Returns
        -------
        list[tuple[AnyItem, bool]] : evicted arrays, in order, and whether each must be written.

        Raises
        ------
        NoRoomError : nothing was evicted.
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
        """Note a use of an array in memory, which changes it if `updated`."""
        self._time += 1
        self._held[item] = self._time
        if updated:
            self._updated.add(item)
            if not item.transient:
                self._changed.add(item)

    def change(self, item: AnyItem) -> None:
        """Note that an array in memory differs from its copy on the drives."""
        self._changed.add(item)

    def wrote(self, item: AnyItem) -> None:
        """Note that an array in memory is equal to its copy on the drives."""
        self._changed.discard(item)

    def written(self) -> list[AnyItem]:
        """Return all changed arrays, in the order of their uses, and mark them as written."""
        found = [item for item in self._held if item in self._changed]
        self._changed.clear()
        return sorted(found, key=self._held.__getitem__)

    def end_iteration(self) -> None:
        """Begin the next iteration: only used gradients count as updated."""
        self._updated = {item for item in self._updated if item.transient}
