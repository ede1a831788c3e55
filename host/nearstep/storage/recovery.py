"""What a set of drives holds when it is opened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nearstep.storage.drive import Drive
from nearstep.storage.drive_errors import NoGenerationError, TornIndexError
from nearstep.storage.extents import Run
from nearstep.storage.generation import Generation, load, read_slots
from nearstep.storage.space import Space
from nearstep.storage.superblock import Superblock


@dataclass(frozen=True)
class Found:
    """Generations of a set.

    Attributes
    ----------
    current : the one to go on from.
    other : the one beside it, if it is whole.
    last : the highest number of any.
    notes : what is not as it should be, but is not needed.
    """

    current: Generation
    other: Generation | None
    last: int
    notes: list[str]


def find(drives: Sequence[Drive], wanted: int | None) -> Found:
    """The generations of a set.

    Parameters
    ----------
    drives
    wanted : to go on from; None for the last.

    Raises
    ------
    NoGenerationError : there is none, or not this one.
    TornIndexError : its index is damaged.
    DriveIOError, ShortTransferError, DriveVanishedError
    """
    first, notes = drives[0], []
    found: dict[int, tuple[int, Superblock]] = {}
    for slot, superblock in read_slots(first.blocks, first.header.set_id).items():
        if isinstance(superblock, Superblock):
            found[superblock.generation] = slot, superblock
        elif superblock:
            notes.append(f"superblock {slot} of {first.name}: {superblock}")
    number = max(found, default=None) if wanted is None else wanted
    if number is None or number not in found:
        raise NoGenerationError(wanted, sorted(found), "".join(f"; {note}" for note in notes))
    other: Generation | None = None
    for each in found.keys() - {number}:
        try:
            other = load(drives, *found[each])
        except TornIndexError as error:
            notes.append(str(error))
    try:
        current = load(drives, *found[number])
    except TornIndexError as error:
        raise error.beside([] if other is None else [other.number]) from None
    return Found(current, other, max(found), notes)


def account(found: Found, sizes: Sequence[int]) -> tuple[Space, list[Run]]:
    """What is free on drives of so many blocks, and what only the other generation needs.

    Raises
    ------
    StorageError : generations have different extents at one block.
    """
    used, dying = found.current.runs(), []
    if found.other is not None:
        held = set(map(tuple, used.tolist()))
        dying = [Run(*run) for run in found.other.runs().tolist() if tuple(run) not in held]
        used = np.concatenate([used, np.array(dying, np.int64).reshape(-1, 3)])
    return Space(sizes, used), dying
