"""The extents of a tensor: runs of blocks on drives."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import ArgumentError, OutOfBoundsError
from nearstep.scalars import is_whole
from nearstep.storage.blocks import BLOCK_BYTES

EXTENT = np.dtype([("block", "<u8"), ("blocks", "<u4"), ("drive", "<u4"), ("crc", "<u4")])
"""An extent in an index: first block, blocks, index of the drive, and CRC-32 of all of its bytes,
with the zeros after the end of the tensor."""

HOLE = 0xFFFF_FFFF
"""Drive of an extent that was never written: zeros without blocks."""


class Run(NamedTuple):
    """A run of consecutive blocks of a drive."""

    drive: int
    block: int
    blocks: int


NO_CRCS: Mapping[Run, int] = MappingProxyType({})


class ExtentRow(NamedTuple):
    """An extent: a row of a table.

    Attributes
    ----------
    number : index of the row.
    start : first block within the tensor.
    block, blocks, drive, crc : as in `EXTENT`.
    """

    number: int
    start: int
    block: int
    blocks: int
    drive: int
    crc: int

    @property
    def stop(self) -> int:
        return self.start + self.blocks

    @property
    def is_hole(self) -> bool:
        return self.drive == HOLE

    @property
    def run(self) -> Run:
        return Run(self.drive, self.block, self.blocks)


class Table:
    """The extents of a tensor, in order. A table is immutable.

    Parameters
    ----------
    rows : shape (extents,), dtype `EXTENT`.

    Attributes
    ----------
    starts : first block of each extent within the tensor, then the number of blocks.
    """

    def __init__(self, rows: NDArray[Any]) -> None:
        rows.flags.writeable = False
        self.rows = rows
        self.starts: NDArray[np.int64] = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(rows["blocks"], out=self.starts[1:])

    @classmethod
    def of_hole(cls, blocks: int, step: int) -> Table:
        """Return a table of unwritten zeros, in extents of `step` blocks."""
        rows = np.zeros(-(-blocks // step), EXTENT)
        rows["blocks"], rows["drive"] = step, HOLE
        if blocks % step:
            rows["blocks"][-1] = blocks % step
        return cls(rows)

    def __len__(self) -> int:
        return len(self.rows)

    def extent(self, number: int) -> ExtentRow:
        (found,) = self.extents(range(number, number + 1))
        return found

    def covering(self, first: int, last: int) -> range:
        """Return the numbers of the extents that contain any of the blocks [first, last)."""
        # numpy's search releases Python's lock, and would then wait for the threads of the drives.
        return range(bisect_right(self.starts, first) - 1, bisect_left(self.starts, last))

    def extents(
        self, numbers: range | None = None, crcs: Mapping[Run, int] = NO_CRCS
    ) -> Iterator[ExtentRow]:
        """Yield extents, with the CRCs of `crcs` where it has them."""
        numbers = range(len(self)) if numbers is None else numbers
        part = slice(numbers.start, numbers.stop)
        rows = self.rows[part].tolist()
        for number, start, row in zip(numbers, self.starts[part].tolist(), rows, strict=False):
            block, blocks, drive, crc = row
            crc = crcs.get(Run(drive, block, blocks), crc)
            yield ExtentRow(number, start, block, blocks, drive, crc)

    def spliced(self, numbers: range, runs: Sequence[Run]) -> Table:
        """Return a table in which these extents are replaced by others of as many blocks, without
        CRCs."""
        parts = [self.rows[: numbers.start], rows_of(runs), self.rows[numbers.stop :]]
        parts = [each for each in parts if len(each)]
        return Table(parts[0] if len(parts) == 1 else np.concatenate(parts))

    def summed(self, crcs: Mapping[Run, int]) -> Table:
        """Return this table with the CRCs of new extents filled in."""
        rows = self.rows.copy()
        new = np.flatnonzero((rows["crc"] == 0) & (rows["drive"] != HOLE))
        runs = [Run(drive, block, blocks) for block, blocks, drive, _ in rows[new].tolist()]
        rows["crc"][new] = [crcs.get(run, 0) for run in runs]
        return Table(rows)


def parts_of(data: NDArray[Any], runs: Sequence[Run]) -> Iterator[tuple[Run, NDArray[Any]]]:
    """Yield each run of blocks with its part of the bytes of `data`."""
    at = 0
    for run in runs:
        yield run, data[at : at + run.blocks * BLOCK_BYTES]
        at += run.blocks * BLOCK_BYTES


def rows_of(runs: Sequence[Run]) -> NDArray[Any]:
    """Return the runs as rows of `EXTENT`, without CRCs."""
    return np.array([(run.block, run.blocks, run.drive, 0) for run in runs], EXTENT)


def overlap(rows: NDArray[Any], *, shared: bool = False) -> bool:
    """Return whether two extents overlap; equal ones, CRC included, are allowed if `shared`."""
    drive, start, count, crc = (
        rows[name][rows["drive"] != HOLE].astype(np.int64)
        for name in ("drive", "block", "blocks", "crc")
    )
    order = np.lexsort((count, start, drive))
    drive, start, stop, crc = drive[order], start[order], (start + count)[order], crc[order]
    clash = (drive[1:] == drive[:-1]) & (start[1:] < stop[:-1])
    if shared:
        same = (start[1:] == start[:-1]) & (stop[1:] == stop[:-1]) & (crc[1:] == crc[:-1])
        clash &= ~same
    return bool(clash.any())


@dataclass(frozen=True)
class Tensor:
    """A tensor of a generation.

    Attributes
    ----------
    attributes : the owner's, such as dtype and shape.
    first_drive : drive of the first extent, if it has space.
    pinned : whether all extents are on that drive.
    step : most blocks of an extent; 0: those of the set.
    """

    name: str
    nbytes: int
    attributes: Mapping[str, Any]
    table: Table
    first_drive: int = 0
    pinned: bool = False
    step: int = 0

    @property
    def blocks(self) -> int:
        return blocks_of(self.nbytes)

    def span(self, offset: int, nbytes: int) -> tuple[int, int]:
        """Return the range of blocks, last exclusive, of the extents that contain these bytes.

        Raises
        ------
        OutOfBoundsError : the tensor is shorter.
        ArgumentError : the offset is no whole number.
        """
        if not is_whole(offset):
            raise ArgumentError(f"offset must be a whole number, not {offset!r}")
        stop = offset + nbytes
        if not 0 <= offset <= stop <= self.nbytes:
            raise OutOfBoundsError(f"bytes of {self.name!r}", offset, stop, self.nbytes)
        numbers = (
            self.table.covering(offset // BLOCK_BYTES, blocks_of(stop)) if nbytes else range(0)
        )
        return int(self.table.starts[numbers.start]), int(self.table.starts[numbers.stop])


def blocks_of(nbytes: int) -> int:
    """Return the number of blocks that hold `nbytes`."""
    return -(-nbytes // BLOCK_BYTES)
