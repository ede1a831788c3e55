"""The generations of a set of drives when it is opened."""

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
from nearstep.storage.extents import overlap
from nearstep.storage.generation import Generation, Slot, load, read_slots


@dataclass(frozen=True)
class Recovered:
    """Generations of a set.

    Attributes
    ----------
    current : the one to start from.
    other : the one beside it, if it is whole.
    last : the highest number of any.
    slots : as they are on the drives.
    notes : damage that loses nothing.
    warnings : damage of superblocks that no power cut explains.
    """

    current: Generation
    other: Generation | None
    last: int
    slots: Sequence[Slot]
    notes: list[str]
    warnings: list[DamagedSuperblockWarning] = field(default_factory=list)


def find(drives: Sequence[Drive], wanted: int | None) -> Recovered:
    """Find the generations of a set.

    Parameters
    ----------
    wanted : number of the one to start from; None for the last.

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
    """Damage of the superblocks of a drive: notes where a power cut explains it, else warnings."""
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
    if overlap(np.concatenate([each.extents() for each in generations]), shared=True):
        raise StorageError("two generations have different extents at the same block")
