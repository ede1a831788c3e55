"""`nearstep card serve` on a drive with a cache: the end of the process loses what is not synced.

    python volatile_drive.py keep|drop card serve ...

A half of all blocks reach the file at once, the others with the next sync, as the cache of a drive
may do it. With `drop` the drive forgets to sync.
"""

from __future__ import annotations

import os
import random
import sys
import threading

from nearstep.cli import main
from nearstep.linux.nvme import namespace

BLOCK = 4096


class VolatileDrive:
    """Stands in for `os` in the namespace of the drive."""

    def __init__(self, *, drops: bool) -> None:
        self._drops = drops
        self._draw = random.Random(1)
        self._lock = threading.Lock()
        self._cache: dict[int, bytes] = {}

    def __getattr__(self, name: str) -> object:
        return getattr(os, name)

    def pwrite(self, fd: int, data: bytes, offset: int) -> int:
        with self._lock:
            for at in range(0, len(data), BLOCK):
                block = data[at : at + BLOCK]
                if self._draw.random() < 0.5:
                    os.pwrite(fd, block, offset + at)
                    self._cache.pop(offset + at, None)
                else:
                    self._cache[offset + at] = block
        return len(data)

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        with self._lock:
            data = os.pread(fd, nbytes, offset)
            blocks = [
                self._cache.get(offset + at, data[at : at + BLOCK])
                for at in range(0, len(data), BLOCK)
            ]
        return b"".join(blocks)

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            if not self._drops:
                for offset, block in self._cache.items():
                    os.pwrite(fd, block, offset)
                self._cache.clear()


if __name__ == "__main__":
    vars(namespace)["os"] = VolatileDrive(drops=sys.argv.pop(1) == "drop")
    main()
