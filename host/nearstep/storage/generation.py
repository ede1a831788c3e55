"""A state of all tensors that was committed as one."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES, Blocks
from nearstep.storage.checksum import crc32
from nearstep.storage.drive import Drive
from nearstep.storage.drive_errors import DriveIOError, ShortTransferError, TornIndexError
from nearstep.storage.extents import Run, Tensor, rows_of
from nearstep.storage.header import Header
from nearstep.storage.index import IndexFormatError, unpack_index
from nearstep.storage.superblock import SLOTS, Superblock, Unreadable, copies, unpack


@dataclass(frozen=True)
class Generation:
    """A state of all tensors.

    Attributes
    ----------
    slot : of its superblock.
    meta : what its owner keeps with it, such as the step.
    tensors : by name.
    superblock : what the slot holds.
    """

    slot: int
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    superblock: Superblock

    @property
    def number(self) -> int:
        return self.superblock.generation

    @property
    def index_runs(self) -> Sequence[Run]:
        """Where its index lies."""
        return self.superblock.runs

    def extents(self) -> NDArray[Any]:
        """All that it needs, its index first."""
        return np.concatenate(
            [rows_of(self.index_runs), *(each.table.rows for each in self.tensors.values())]
        )


@dataclass(frozen=True)
class Slot:
    """What both copies of a superblock hold.

    Attributes
    ----------
    number : of the slot.
    copies : by block the superblock, or why there is none: empty if nothing was written.
    """

    number: int
    copies: Mapping[int, Superblock | str]

    @property
    def superblock(self) -> Superblock | None:
        """Of the newest generation that a copy speaks of."""
        found = [each for each in self.copies.values() if isinstance(each, Superblock)]
        return max(found, key=lambda each: each.generation, default=None)

    @property
    def lost(self) -> bool:
        """Whether no copy is whole, of which one was."""
        return self.superblock is None and len(self.damage) == len(self.copies)

    @property
    def damage(self) -> Mapping[int, str]:
        """By block what is the matter with it."""
        return {k: v for k, v in self.copies.items() if isinstance(v, str) and v}

    def was_cut_off(self, newest: int) -> bool:
        """Whether a commit that was cut off explains the damage, where `newest` is the last
        generation of the set: it tears the first copy before the second one is written, or the
        second copy of the last generation."""
        first, second = self.copies.values()
        if len(self.damage) != 1 or any(isinstance(each, Unreadable) for each in (first, second)):
            return False
        if isinstance(first, Superblock):
            return first.generation == newest
        return not isinstance(second, Superblock) or second.generation < newest


def read_slots(blocks: Blocks, header: Header) -> list[Slot]:
    """What the superblocks of a set hold.

    Parameters
    ----------
    blocks : of the first drive.
    header : of that drive.
    """
    return [
        Slot(
            slot, {at: _read_copy(blocks, at, header.set_id) for at in copies(slot, header.blocks)}
        )
        for slot in SLOTS
    ]


def _read_copy(blocks: Blocks, at: int, set_id: uuid.UUID) -> Superblock | str:
    block = aligned_bytes(BLOCK_BYTES)
    try:
        blocks.read(at, block)
    except (DriveIOError, ShortTransferError) as error:
        return Unreadable(error)
    return unpack(block, set_id)


def load(drives: Sequence[Drive], slot: Slot) -> Generation:
    """The generation that a slot speaks of, which has a superblock.

    Raises
    ------
    TornIndexError : its index is not what was written.
    """
    superblock = slot.superblock
    assert superblock is not None
    number, sizes = superblock.generation, [drive.header.blocks for drive in drives]
    data = aligned_bytes(BLOCK_BYTES * sum(run.blocks for run in superblock.runs))
    at, transfers = 0, []
    for run in superblock.runs:
        if run.drive >= len(drives) or run.block + run.blocks > sizes[run.drive]:
            raise TornIndexError("its superblock names blocks that are on no drive", number)
        nbytes = run.blocks * BLOCK_BYTES
        transfers.append(drives[run.drive].read(run.block, data[at : at + nbytes]))
        at += nbytes
    for transfer in transfers:
        transfer.wait()
    data = data[: superblock.index_bytes]
    actual = crc32(data)
    if actual != superblock.index_crc:
        expected = superblock.index_crc
        reason = f"CRC-32 of its index must be {expected:#010x}, not {actual:#010x}"
        raise TornIndexError(reason, number)
    try:
        tensors, meta = unpack_index(data.tobytes(), number, sizes, superblock.runs)
    except IndexFormatError as error:
        raise TornIndexError(f"its index: {error}", number) from None
    return Generation(slot.number, meta, tensors, superblock)
