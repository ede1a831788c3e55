"""Which blocks of a drive are free."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sortedcontainers import SortedDict, SortedList


class FreeSpace:
    """Runs of free blocks, found by place and by length.

    Parameters
    ----------
    runs : first block and length of each run that is free at first; no two touch.

    Attributes
    ----------
    blocks : free ones.
    """

    def __init__(self, runs: Iterable[tuple[int, int]]) -> None:
        self._by_start: Any = SortedDict()
        self._by_count: Any = SortedList()
        self.blocks = 0
        for start, count in runs:
            self._add(start, count)

    def take(self, count: int) -> tuple[int, int]:
        """Start and length of a run that is no longer free: of `count` blocks if there is one so
        long (of those the shortest), else the longest there is.

        There must be a free block.
        """
        place = self._by_count.bisect_left((count, 0))
        length, start = self._by_count[min(place, len(self._by_count) - 1)]
        self._remove(start, length)
        taken = min(count, length)
        if taken < length:
            self._add(start + taken, length - taken)
        return start, taken

    def release(self, start: int, count: int) -> None:
        """Have a run free again, as one with what is free beside it."""
        place = self._by_start.bisect_right(start)
        if place < len(self._by_start):
            after, length = self._by_start.peekitem(place)
            if after == start + count:
                self._remove(after, length)
                count += length
        if place > 0:
            before, length = self._by_start.peekitem(place - 1)
            if before + length == start:
                self._remove(before, length)
                start, count = before, count + length
        self._add(start, count)

    def _add(self, start: int, count: int) -> None:
        self._by_start[start] = count
        self._by_count.add((count, start))
        self.blocks += count

    def _remove(self, start: int, count: int) -> None:
        del self._by_start[start]
        self._by_count.remove((count, start))
        self.blocks -= count
