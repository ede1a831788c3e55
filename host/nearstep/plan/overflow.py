"""Steps of an optimizer whose arrays are kept on drives if they do not fit in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from nearstep.errors import ArgumentError
from nearstep.plan.residency import Candidate, Residency, belady, updated_first

Eviction = Literal["updated_first", "belady"]
"""Policy of eviction: section 5.3 of AXDIMM, or the array whose next use is last."""

Kind = Literal["evict", "drop", "load", "make"]
"""Moves: write an array to the drives; drop it, because the drives have it; read it; make it,
because the update or the host writes all of it.
"""


@dataclass(frozen=True)
class Array:
    """One array of the parameters that are updated together.

    Attributes
    ----------
    unit : index of these parameters.
    nbytes : in memory, of each channel.
    transient : whether the array is a gradient, which is dropped on eviction.
    """

    unit: int
    name: str
    nbytes: int
    transient: bool = False


@dataclass(frozen=True)
class ArrayMove:
    """A move of one array."""

    kind: Kind
    array: Array


class OverflowPlan:
    """Plan of the moves before each update, and of the writes at the end of a step.

    After `written` the drives have all arrays; so an array in memory that a later step has not used
    yet is evicted without a write. Each array is written once a step.

    Parameters
    ----------
    capacity : bytes of memory of each channel.

    Attributes
    ----------
    units : number of units; a step updates them in order.
    descends : a step updates the last unit first, as backward does.

    Raises
    ------
    ArgumentError : there is no such policy.
    """

    def __init__(self, capacity: int, eviction: Eviction) -> None:
        if eviction not in get_args(Eviction):
            raise ArgumentError(f"eviction must be one of {get_args(Eviction)}, not {eviction!r}")
        self.units = 0
        self.descends = False
        policy = self._used_last if eviction == "belady" else updated_first
        self._memory: Residency[Array] = Residency(0, capacity, policy)

    @property
    def peak(self) -> int:
        """Peak of the memory of a channel in bytes."""
        return self._memory.peak

    def __contains__(self, array: Array) -> bool:
        """Whether an array is in memory."""
        return array in self._memory

    def update(self, arrays: Sequence[Array], made: Sequence[Array]) -> list[ArrayMove]:
        """Plan the moves before the update of all arrays of one unit.

        Parameters
        ----------
        made : arrays that need not be read from the drives.

        Raises
        ------
        NoRoomError : nothing was changed.
        """
        missing = [each for each in arrays if each not in self._memory]
        gone = self._memory.make_room(arrays, arrays[0].unit)
        moves = [ArrayMove("evict" if changed else "drop", item) for item, changed in gone]
        moves += [ArrayMove("make" if each in made else "load", each) for each in missing]
        for each in arrays:
            self._memory.use(each, updated=True)
        return moves

    def change(self, array: Array) -> None:
        """Note that an array in memory was written, not by an update."""
        self._memory.change(array)

    def wrote(self, array: Array) -> None:
        """Note that the drives have an array in memory."""
        self._memory.wrote(array)

    def resize(self, capacity: int) -> None:
        """Change the memory of each channel; later updates evict what it does not hold."""
        self._memory.capacity = capacity

    def written(self) -> list[Array]:
        """End a step, and return the arrays that must be written to the drives."""
        self._memory.end_iteration()
        return self._memory.written()

    def _used_last(self, candidates: Sequence[Candidate[Array]], now: int) -> Array:
        def place(unit: int) -> int:
            return self.units - 1 - unit if self.descends else unit

        items = [each.item for each in candidates]
        uses = {each: () if each.transient else (place(each.unit),) for each in items}
        return belady(uses, self.units)(candidates, place(now))
