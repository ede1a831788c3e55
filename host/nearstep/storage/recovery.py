"""What a set of drives holds when it is opened."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from nearstep.storage.drive import Drive
from nearstep.storage.drive_errors import (
    DamagedSuperblockWarning,
    NoGenerationError,
    StorageError,
    TornIndexError,
)
from nearstep.storage.extents import HOLE
from nearstep.storage.generation import Generation, Slot, load, read_slots


@dataclass(frozen=True)
class Recovered:
    """Generations of a set.

    Attributes
    ----------
    current : the one to go on from.
    other : the one beside it, if it is whole.
    last : the highest number of any.
    slots : as they are on the drives.
    notes : what is not as it should be, but is not needed.
    warnings : superblocks that are damaged, as no power cut does it.
    """

    current: Generation
    other: Generation | None
    last: int
    slots: Sequence[Slot]
    notes: list[str]
    warnings: list[DamagedSuperblockWarning] = field(default_factory=list)


def find(drives: Sequence[Drive], wanted: int | None) -> Recovered:
    """The generations of a set.

    Parameters
    ----------
    wanted : to go on from; None for the last.

    Raises
    ------
    NoGenerationError : there is none, or not this one.
    TornIndexError : its index is damaged.
    StorageError : generations have different extents at one block.
    """
    first = drives[0]
    slots = read_slots(first.blocks, first.header)
    notes, warnings = damage(first.name, slots)
    found = {each.superblock.generation: each for each in slots if each.superblock is not None}
    number = max(found, default=None) if wanted is None else wanted
    if number is None or number not in found:
        details = "".join(f"; {each}" for each in [*notes, *warnings])
        raise NoGenerationError(wanted, sorted(found), details)
    other: Generation | None = None
    for each in found.keys() - {number}:
        try:
            other = load(drives, found[each])
        except TornIndexError as error:
            notes.append(str(error))
    try:
        current = load(drives, found[number])
    except TornIndexError as error:
        raise error.beside([] if other is None else [other.number]) from None
    check_apart([current] if other is None else [current, other])
    return Recovered(current, other, max(found), slots, notes, warnings)


def damage(path: str, slots: Sequence[Slot]) -> tuple[list[str], list[DamagedSuperblockWarning]]:
    """What is the matter with the superblocks of a drive: what a power cut leaves, and what not."""
    whole = sorted(each.superblock.generation for each in slots if each.superblock is not None)
    notes, warnings = [], []
    for slot in slots:
        named = ", ".join(f"block {at}: {reason}" for at, reason in slot.damage.items())
        if named and slot.was_cut_off(max(whole, default=0)):
            notes.append(f"superblock {slot.number} of {path}, {named}")
        elif named:
            warnings.append(DamagedSuperblockWarning(path, slot.number, named, whole, slot.lost))
    return notes, warnings


def check_apart(generations: Iterable[Generation]) -> None:
    """Raise `StorageError` if generations have different extents at one block."""
    rows = np.concatenate([each.extents() for each in generations])
    places = np.stack([rows["drive"], rows["block"], rows["blocks"]], axis=1).astype(np.int64)
    places = np.unique(places[rows["drive"] != HOLE], axis=0)  # in their order
    drive, start, count = places.T
    if ((drive[1:] == drive[:-1]) & (start[1:] < (start + count)[:-1])).any():
        raise StorageError("two generations have different extents at the same block")
