"""A state of all tensors that was committed as one."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES, Blocks
from nearstep.storage.checksum import crc32
from nearstep.storage.drive import Drive
from nearstep.storage.drive_errors import TornIndexError
from nearstep.storage.extents import HOLE, Run, Tensor
from nearstep.storage.index import IndexFormatError, unpack_index
from nearstep.storage.space import Runs
from nearstep.storage.superblock import SLOTS, Superblock, unpack


@dataclass(frozen=True)
class Generation:
    """A state of all tensors.

    Attributes
    ----------
    number
    slot : block of its superblock.
    meta : what its owner keeps with it, such as the step.
    tensors : by name.
    index_runs : where its index lies.
    """

    number: int
    slot: int
    meta: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    index_runs: Sequence[Run]

    def runs(self) -> Runs:
        """All blocks that it needs."""
        rows = [each.table.rows for each in self.tensors.values()]
        parts = [
            np.stack([each["drive"], each["block"], each["blocks"]], axis=1).astype(np.int64)
            for each in (part[part["drive"] != HOLE] for part in rows)
        ]
        own = np.array(self.index_runs, np.int64).reshape(-1, 3)
        return np.concatenate([own, *parts])


def read_slots(blocks: Blocks, set_id: uuid.UUID) -> dict[int, Superblock | str]:
    """By block of the slot the superblock that it holds, or why it holds none.

    Raises
    ------
    DriveIOError, ShortTransferError, DriveVanishedError
    """
    found = {}
    for slot in SLOTS:
        block = aligned_bytes(BLOCK_BYTES)
        blocks.read(slot, block)
        found[slot] = unpack(block, set_id)
    return found


def load(drives: Sequence[Drive], slot: int, superblock: Superblock) -> Generation:
    """The generation that a superblock speaks of.

    Raises
    ------
    TornIndexError : its index is not what was written.
    DriveIOError, ShortTransferError, DriveVanishedError
    """
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
    return Generation(number, slot, meta, tensors, superblock.runs)
