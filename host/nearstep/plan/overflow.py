"""Steps of an optimizer whose arrays lie on drives as far as memory does not hold them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from nearstep.errors import ArgumentError
from nearstep.plan.residency import Candidate, Residency, belady, updated_first

Eviction = Literal["updated_first", "belady"]
"""What gives way: section 5.3 of AXDIMM, or what is used again last."""

Kind = Literal["evict", "drop", "load", "make"]
"""An array to the drives; given up, since they have it; from the drives; made, since the update, or
the host, writes all of it."""


@dataclass(frozen=True)
class Array:
    """One array of the parameters that are updated together.

    Attributes
    ----------
    unit : index of these parameters.
    nbytes : in memory, of each channel.
    transient : a gradient.
    """

    unit: int
    name: str
    nbytes: int
    transient: bool = False


@dataclass(frozen=True)
class ArrayMove:
    """One thing to do."""

    kind: Kind
    array: Array


class OverflowPlan:
    """Says what to move for each update, and what to write at the end of a step.

    After `written` the drives have everything; so an array that a later step finds in memory, and
    has not come to yet, gives way without being written. Each array is written once a step.

    Parameters
    ----------
    capacity : bytes of memory of each channel.

    Attributes
    ----------
    units : how many there are; a step updates them in their order.

    Raises
    ------
    ArgumentError : there is no such policy, or the capacity is negative.
    """

    def __init__(self, capacity: int, eviction: Eviction) -> None:
        if eviction not in get_args(Eviction):
            raise ArgumentError(f"eviction must be one of {get_args(Eviction)}, not {eviction!r}")
        self.units = 0
        policy = self._used_last if eviction == "belady" else updated_first
        self._memory: Residency[Array] = Residency(0, capacity, policy)

    @property
    def peak(self) -> int:
        """Most bytes of a channel that were in use."""
        return self._memory.peak

    def __contains__(self, array: Array) -> bool:
        """Whether it is in memory."""
        return array in self._memory

    def update(self, arrays: Sequence[Array], made: Sequence[Array]) -> list[ArrayMove]:
        """All arrays of one unit are about to be used, and changed.

        Parameters
        ----------
        made : those of them that need not come from the drives.

        Raises
        ------
        NoRoomError : nothing has been decided.
        """
        missing = [each for each in arrays if each not in self._memory]
        gone = self._memory.make_room(arrays, arrays[0].unit)
        moves = [ArrayMove("evict" if changed else "drop", item) for item, changed in gone]
        moves += [ArrayMove("make" if each in made else "load", each) for each in missing]
        for each in arrays:
            self._memory.use(each, updated=True)
        return moves

    def change(self, array: Array) -> None:
        """An array in memory was written, not by an update."""
        self._memory.change(array)

    def written(self) -> list[Array]:
        """What the drives do not have yet; it is written, and a step has ended."""
        self._memory.end_iteration()
        return self._memory.written()

    def _used_last(self, candidates: Sequence[Candidate[Array]], now: int) -> Array:
        uses = {each.item: () if each.item.transient else (each.item.unit,) for each in candidates}
        return belady(uses, self.units)(candidates, now)
