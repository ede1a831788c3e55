"""Free blocks of all drives of a set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_errors import DriveFullError, StorageError
from nearstep.storage.extents import Run
from nearstep.storage.free_space import FreeSpace
from nearstep.storage.superblock import FIRST_FREE

Runs = NDArray[np.int64]
"""Runs as rows: drive, first block, number of blocks."""


class Space:
    """Which blocks of which drive are free.

    Parameters
    ----------
    blocks : of each drive.
    used : runs that are not free.

    Raises
    ------
    StorageError : two runs have the same block.
    """

    def __init__(self, blocks: Sequence[int], used: Runs) -> None:
        self._drives = [
            FreeSpace(_gaps(used[used[:, 0] == drive], count)) for drive, count in enumerate(blocks)
        ]

    @property
    def free(self) -> Sequence[int]:
        """Free blocks of each drive."""
        return [drive.blocks for drive in self._drives]

    def check(self, count: int, only: int | None = None) -> None:
        """Raise `DriveFullError` unless so many blocks are free, on one drive if it is given."""
        free = sum(self.free) if only is None else self.free[only]
        if free < count:
            detail = f" on {len(self._drives)} drives" if only is None else f" on drive {only}"
            raise DriveFullError(count * BLOCK_BYTES, free * BLOCK_BYTES, detail)

    def take(self, count: int, preferred: int, *, pinned: bool = False) -> list[Run]:
        """Runs of `count` blocks together, on one drive if it has them, in one piece if that has.

        Parameters
        ----------
        count
        preferred : drive that is asked first.
        pinned : no other one is asked.

        Raises
        ------
        DriveFullError : nothing was taken.
        """
        self.check(count, preferred if pinned else None)
        runs: list[Run] = []
        while count:
            drive = preferred if self._drives[preferred].blocks else self._emptiest()
            start, taken = self._drives[drive].take(count)
            runs.append(Run(drive, start, taken))
            count -= taken
        return runs

    def release(self, runs: Iterable[Run]) -> None:
        """Have runs free again."""
        for drive, start, count in runs:
            self._drives[drive].release(start, count)

    def _emptiest(self) -> int:
        free = self.free
        return free.index(max(free))


def _gaps(used: Runs, blocks: int) -> list[tuple[int, int]]:
    """What is between runs of one drive."""
    order = used[np.argsort(used[:, 1])]
    ends = np.concatenate([[FIRST_FREE], order[:, 1] + order[:, 2]])
    starts = np.concatenate([order[:, 1], [blocks]])
    lengths = starts - ends
    if (lengths < 0).any():
        raise StorageError("two generations have different extents at the same block")
    return [(int(ends[at]), int(lengths[at])) for at in np.flatnonzero(lengths)]
