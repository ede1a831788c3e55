"""Files of a set whose creation was interrupted."""

from __future__ import annotations

import os
import uuid
from collections.abc import Sequence
from pathlib import Path

from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES, BlockFile, Bytes
from nearstep.storage.drive_errors import DriveSizeError, NotADriveError
from nearstep.storage.generation import read_slots
from nearstep.storage.header import HEADER_BLOCK, MAGIC, is_whole, read_header
from nearstep.storage.superblock import FIRST_FREE, LAYOUT, SLOTS
from nearstep.storage.superblock import MAGIC as SUPERBLOCK_MAGIC

READ_BYTES = 1 << 20
"""Bytes per read."""


def unfinished(places: Sequence[str | Path]) -> list[Path]:
    """Return the existing files of a set that can be removed without loss of data.

    Such sets are those of a `nearstep.storage.drive_set.create_set` that was interrupted at any
    point, and sets with only generation 0, which is empty. Remove the last file first: the
    remaining ones are such a set, too.

    Parameters
    ----------
    places : of the whole set, in order.

    Returns
    -------
    list[Path] : the files that exist; empty if any of them is something else.
    """
    there = [each for each in map(Path, places) if os.path.lexists(each)]
    if not there or not all(each.is_file() for each in there):
        return []
    try:
        sets = {each: _set_of(each, is_first=each == Path(places[0])) for each in there}
    except (NotADriveError, DriveSizeError):
        return []
    first = sets.get(Path(places[0]))
    known = {each for each in sets.values() if each is not None}
    return there if known <= {first} else []


def _set_of(path: Path, *, is_first: bool) -> uuid.UUID | None:
    """Return the set of a drive; None for a drive without a header.

    Raises
    ------
    NotADriveError : the file is not of a set, or has a generation after 0.
    """
    blocks = BlockFile(path, direct=False, read_only=True)
    try:
        head = [_block(blocks, each) for each in (HEADER_BLOCK, *SLOTS)]
        if is_whole(head[0]):
            header = read_header(blocks)
            slots = read_slots(blocks, header)
            generations = [each.superblock.generation for each in slots if each.superblock]
            if any(slot.lost for slot in slots) or (is_first and not generations):
                raise NotADriveError(str(path), "its superblocks are damaged")
        else:
            header, generations = None, [_generation(each) or 0 for each in head[1:]]
        if any(generations):
            raise NotADriveError(str(path), f"it has generation {max(generations)}")
        if header is not None:
            return header.set_id
        begins = head[0][: len(MAGIC)].tobytes()
        if begins not in (MAGIC, bytes(len(MAGIC))) or _has_data(path, FIRST_FREE + is_first):
            raise NotADriveError(str(path), "it is not part of an unfinished set")
        return None
    finally:
        blocks.close()


def _block(blocks: BlockFile, number: int) -> Bytes:
    """Return a block of a file; zeros after its end."""
    block = aligned_bytes(BLOCK_BYTES)
    if number < blocks.count:
        blocks.read(number, block)
    return block


def _generation(block: Bytes) -> int | None:
    """Return the generation of a superblock; None if the block is not a valid superblock."""
    if not block.any() or not is_whole(block):
        return None
    magic, _, generation, *_ = LAYOUT.unpack_from(block.tobytes())
    return int(generation) if magic == SUPERBLOCK_MAGIC else None


def _has_data(path: Path, block: int) -> bool:
    """Return whether a file has data other than zeros from a block on."""
    at = block * BLOCK_BYTES
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        while at < size:
            try:
                at = os.lseek(file.fileno(), at, os.SEEK_DATA)
            except OSError:
                return False  # the rest is a hole
            file.seek(at)
            part = file.read(READ_BYTES)
            if any(part):
                return True
            at += len(part)
    return False
