"""Free blocks of all drives of a set."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_errors import DriveFullError
from nearstep.storage.extents import Run
from nearstep.storage.superblock import FIRST_FREE, end_of


class FreeMap:
    """Blocks that no generation or transaction uses, derived from their extents.

    Blocks are allocated and never freed: a new map is built instead, in which blocks that were
    allocated and not used, as after an interrupt, are free. So the map is correct at any point of
    `take`.

    Parameters
    ----------
    blocks : of each drive.
    rows : extents in use; several may have the same blocks.
    """

    def __init__(self, blocks: Sequence[int], rows: Iterable[NDArray[Any]]) -> None:
        used = np.concatenate(list(rows))
        self._gaps = [
            _gaps(used[used["drive"] == drive], end_of(count)) for drive, count in enumerate(blocks)
        ]

    def blocks(self, drive: int | None = None) -> int:
        """Return the number of free blocks on a drive, or on all drives."""
        gaps = self._gaps if drive is None else [self._gaps[drive]]
        return sum(length for each in gaps for length, _ in each)

    def take(self, count: int, drive: int, *, pinned: bool = False) -> list[Run]:
        """Allocate `count` blocks, on one drive and in one run if possible.

        Parameters
        ----------
        drive : first drive to try.
        pinned : use no other drive.

        Raises
        ------
        DriveFullError : some blocks may have been allocated.
        """
        runs: list[Run] = []
        while count:
            free = drive if self._gaps[drive] or pinned else self._emptiest()
            gaps = self._gaps[free]
            if not gaps:
                raise DriveFullError(count * BLOCK_BYTES, 0)
            length, start = gaps.pop(min(bisect_left(gaps, (count, 0)), len(gaps) - 1))
            taken = min(count, length)
            if taken < length:
                insort(gaps, (length - taken, start + taken))
            runs.append(Run(free, start, taken))
            count -= taken
        return runs

    def _emptiest(self) -> int:
        return max(range(len(self._gaps)), key=self.blocks)


def _gaps(used: NDArray[Any], end: int) -> list[tuple[int, int]]:
    """Return the length and first block of the gaps between extents of one drive, shortest
    first."""
    starts = used["block"].astype(np.int64)
    order = np.argsort(starts)
    starts, ends = starts[order], (starts + used["blocks"])[order]
    before = np.concatenate([[FIRST_FREE], np.maximum.accumulate(ends)])
    lengths = np.concatenate([starts, [end]]) - before
    there = lengths > 0
    return sorted(zip(lengths[there].tolist(), before[there].tolist(), strict=True))
