"""Drives of cards in one directory, of which the last step may be on those of another number."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES, BlockFile
from nearstep.storage.drive_errors import (
    DriveAccessError,
    ForeignDriveError,
    IncompleteSetError,
    NoGenerationError,
    NotADriveError,
    OwnerError,
    StorageError,
)
from nearstep.storage.generation import read_slots
from nearstep.storage.header import HEADER_BLOCK, read_header
from nearstep.storage.store import Store
from nearstep.storage.superblock import Superblock
from nearstep.torch.overflow.errors import ResumeError

NAME = re.compile(r"card[0-9]+of([0-9]+)\.nearstep")
"""Files in the place of drives, of so many cards."""

REPLACES = "replaces"
"""In meta data: the set that all was copied from, which is given up."""


class Step(NamedTuple):
    """That a set of drives has one.

    Attributes
    ----------
    places : the drives.
    set_id
    replaces : another set; empty: none.
    """

    places: Sequence[Path]
    set_id: str
    replaces: str


def moved_from(places: Sequence[str], owner: str) -> Sequence[Path]:
    """Drives in the directory of these with the step to go on from; none: these have it, or nobody.

    What a move that was interrupted has left over is removed: drives without a step beside some
    that have it, and drives whose step others have taken over.

    Parameters
    ----------
    places : drives of the cards, one each.
    owner

    Raises
    ------
    ResumeError : it is not clear which ones.
    StorageError
    """
    own = [Path(each) for each in places]
    others = [found for each in _siblings(own) if (found := _step(each, owner)) is not None]
    stale = {each.replaces for each in others}
    for each in [each for each in others if each.set_id in stale]:
        others.remove(each)
        remove(each.places)
    if not others:
        return ()
    here = _step(own, owner)
    if here is not None and here.set_id not in stale:
        for each in others:
            if each.set_id == here.replaces:
                remove(each.places)
        return ()
    if here is None and not _has_no_step(own[0]):
        return ()  # what is the matter is said when they are opened
    if len(others) > 1:
        counts = " and of ".join(str(len(each.places)) for each in others)
        raise ResumeError(f"a step of {owner} on one set", f"on those of {counts} cards")
    remove(own)
    return others[0].places


def remove(places: Sequence[Path]) -> None:
    """Remove the drives of a set, the one with its generations first: what is left then is none."""
    for at in (0, 1):
        try:
            for path in places[at:]:
                path.unlink(missing_ok=True)
                if not at:
                    break
            fd = os.open(places[0].parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
        except OSError as error:
            name = str(places[0].parent)
            raise DriveAccessError(name, f"cannot remove drives: {error}", error.errno) from error


def _siblings(own: Sequence[Path]) -> list[list[Path]]:
    """Other sets of drives of which all files are there."""
    folder = own[0].parent
    found = (NAME.fullmatch(each) for each in (os.listdir(folder) if folder.is_dir() else ()))
    counts = {int(each[1]) for each in found if each is not None} - {len(own)}
    sets = [[folder / f"card{i}of{count}.nearstep" for i in range(count)] for count in counts]
    return [each for each in sorted(sets, key=len) if each and all(map(os.path.lexists, each))]


def _step(places: Sequence[Path], owner: str) -> Step | None:
    """The last step of a set; None: it is none, or another optimizer's, or has none."""
    if not all(map(os.path.lexists, places)):
        return None
    try:
        store = Store.open(places, owner=owner, read_only=True)
    except (NotADriveError, OwnerError, ForeignDriveError, IncompleteSetError, NoGenerationError):
        return None
    with store:
        if store.meta.get("owner") != owner:
            return None
        set_id = str(store.drives[0].header.set_id)
        return Step(places, set_id, str(store.meta.get(REPLACES, "")))


def _has_no_step(first: Path) -> bool:
    """Whether nothing was ever committed to the set that has this drive as its first, or there is
    none."""
    if not os.path.lexists(first):
        return True
    blocks = BlockFile(first, direct=False, read_only=True)
    try:
        block = aligned_bytes(BLOCK_BYTES)
        if blocks.count:
            blocks.read(HEADER_BLOCK, block)
        if not block.any():
            return True
        slots = read_slots(blocks, read_header(blocks).set_id)
        found = [each for each in slots.values() if isinstance(each, Superblock)]
        return all(each.generation == 0 for each in found)
    except StorageError:
        return False
    finally:
        blocks.close()
