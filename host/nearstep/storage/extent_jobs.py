"""Jobs of a drive's threads: transfers between arrays and extents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearstep.storage.aligned import aligned_bytes, is_aligned
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.bounces import Bounces
from nearstep.storage.checksum import crc32
from nearstep.storage.drive import Drive, Job
from nearstep.storage.drive_errors import TornExtentError
from nearstep.storage.extents import ExtentRow, Run

Flat = NDArray[np.uint8]


@dataclass(frozen=True)
class Source:
    """The source of a transfer: a tensor of a generation.

    Attributes
    ----------
    name, nbytes : of the tensor.
    generation : number, for errors.
    others : numbers of the other generations, for errors.
    """

    drives: Sequence[Drive]
    name: str
    nbytes: int
    generation: int
    others: tuple[int, ...]

    def read(self, extent: ExtentRow, into: Flat) -> None:
        """Read all blocks of an extent into an aligned array.

        Raises
        ------
        TornExtentError : the CRC differs.
        """
        if extent.is_hole:
            into[:] = 0
            return
        drive = self.drives[extent.drive]
        drive.read_now(extent.block, into)
        actual = crc32(into)
        if actual != extent.crc:
            what, where = (self.name, extent.number), (drive.name, extent.block, extent.blocks)
            found = (self.generation, *what, *where, extent.crc, actual)
            raise TornExtentError(*found, whole=self.others)

    def span(self, extent: ExtentRow, offset: int, nbytes: int) -> tuple[int, int, bool]:
        """Return the range [first, last) of the tensor's bytes that an extent and a transfer share,
        empty within the extent if none, and whether the transfer covers the extent.

        Parameters
        ----------
        offset, nbytes : of the transfer, in the tensor.
        """
        start, stop = extent.start * BLOCK_BYTES, min(extent.stop * BLOCK_BYTES, self.nbytes)
        first = min(max(start, offset), stop)
        last = max(first, min(stop, offset + nbytes))
        return first, last, (first, last) == (start, stop)


def read_job(source: Source, extent: ExtentRow, offset: int, out: Flat) -> Job:
    """Return a job that reads one extent's part of `out`, which begins at byte `offset` of the
    tensor."""
    first, last, whole = source.span(extent, offset, out.nbytes)
    part, begin = out[first - offset : last - offset], first - extent.start * BLOCK_BYTES

    def job(bounces: Bounces) -> None:
        if whole and is_aligned(part):
            source.read(extent, part)
            return
        with bounces.lend(extent.blocks * BLOCK_BYTES) as blocks:
            source.read(extent, blocks)
            part[:] = blocks[begin : begin + part.nbytes]

    return job


def write_job(
    source: Source,
    extent: ExtentRow,
    old: Sequence[ExtentRow],
    offset: int,
    data: Flat,
    crcs: dict[Run, int],
) -> Job:
    """Return a job that writes one extent's part of `data` and stores the extent's CRC in `crcs`.

    Parameters
    ----------
    old : extents with the previous contents of the rest.
    offset : byte of the tensor at which `data` begins.
    """
    first, last, whole = source.span(extent, offset, data.nbytes)
    part, begin = data[first - offset : last - offset], first - extent.start * BLOCK_BYTES

    def write(blocks: Flat) -> None:
        crc = crc32(blocks)
        source.drives[extent.drive].write_now(extent.block, blocks)
        crcs[extent.run] = crc

    def job(bounces: Bounces) -> None:
        if whole and is_aligned(part):
            write(part)
            return
        with bounces.lend(extent.blocks * BLOCK_BYTES) as blocks:
            if not whole:
                for each in old:
                    _fill(source, each, extent, blocks)
            blocks[begin : begin + part.nbytes] = part
            if whole:
                blocks[part.nbytes :] = 0
            write(blocks)

    return job


def _fill(source: Source, old: ExtentRow, new: ExtentRow, blocks: Flat) -> None:
    """Copy the blocks that an old extent and a new one have in common."""
    first, last = max(old.start, new.start), min(old.stop, new.stop)
    if first >= last:
        return
    if (old.start, old.blocks) == (new.start, new.blocks):
        source.read(old, blocks)
        return
    held = aligned_bytes(old.blocks * BLOCK_BYTES)
    source.read(old, held)
    blocks[(first - new.start) * BLOCK_BYTES : (last - new.start) * BLOCK_BYTES] = held[
        (first - old.start) * BLOCK_BYTES : (last - old.start) * BLOCK_BYTES
    ]
