"""Superblocks: one block names a generation, and is written after all of its data.

The first drive of a set has two slots of two copies each, at its beginning and at its end. A commit
writes the slot that does not hold the current generation, so a power cut during the commit
preserves the current one. The second copy is written after the flush of the first: a power cut
tears at most one of them.
"""

from __future__ import annotations

import struct
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from nearstep.storage.blocks import BLOCK_BYTES, Bytes
from nearstep.storage.extents import Run
from nearstep.storage.header import CRC_AT, is_whole, sealed

MAGIC = b"NSSUPER\n"
SLOTS = (1, 2)
"""Blocks of the first copies, and names of the slots."""

FIRST_FREE = 3
"""First block for tensors and indices on every drive."""

LAYOUT = struct.Struct("<8s16sQQII")
"""Magic, UUID of the set, generation, bytes and CRC-32 of its index, and number of the index's
runs, which follow."""

RUN = struct.Struct("<IQI")
"""Drive, first block and number of blocks."""

MOST_RUNS = (CRC_AT - LAYOUT.size) // RUN.size


@dataclass(frozen=True)
class Superblock:
    """A generation, and the location of its index."""

    set_id: uuid.UUID
    generation: int
    index_bytes: int
    index_crc: int
    runs: Sequence[Run]

    @property
    def index(self) -> tuple[int, int, int, Sequence[Run]]:
        """Generation, bytes, CRC-32 and runs of its index."""
        return self.generation, self.index_bytes, self.index_crc, self.runs

    def pack(self) -> Bytes:
        """Return the superblock as a block."""
        fields = LAYOUT.pack(
            MAGIC,
            self.set_id.bytes,
            self.generation,
            self.index_bytes,
            self.index_crc,
            len(self.runs),
        )
        return sealed(fields + b"".join(RUN.pack(*run) for run in self.runs))


class Unreadable(str):
    """Reason why a block cannot be read; a power cut does not explain such an error."""


def end_of(blocks: int) -> int:
    """Return the end of the blocks for tensors and indices on a drive of `blocks`."""
    return blocks - len(SLOTS)


def copies(slot: int, blocks: int) -> tuple[int, int]:
    """Return the blocks of both copies of a slot on a drive of `blocks`."""
    return slot, blocks - slot


def unpack(block: Bytes, set_id: uuid.UUID) -> Superblock | str:
    """Return a block's superblock, or the reason why it is invalid: empty if unwritten."""
    data = block.tobytes()
    if not any(data):
        return ""
    if not is_whole(block):
        return "the CRC-32 is wrong: a commit was interrupted there, or the block is damaged"
    magic, found, generation, nbytes, crc, count = LAYOUT.unpack_from(data)
    if magic != MAGIC or count > MOST_RUNS:
        return f"it must begin with {MAGIC!r}, not {magic!r}"
    if found != set_id.bytes:
        return f"it is of the set {uuid.UUID(bytes=found)}"
    runs = [Run(*RUN.unpack_from(data, LAYOUT.size + RUN.size * each)) for each in range(count)]
    if nbytes > BLOCK_BYTES * sum(run.blocks for run in runs):
        return "its index is larger than the index's blocks"
    return Superblock(set_id, generation, nbytes, crc, runs)
