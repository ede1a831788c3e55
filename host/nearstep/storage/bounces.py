"""Bounce buffers between a drive and arrays that O_DIRECT cannot transfer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from nearstep.storage.aligned import aligned_bytes, is_aligned
from nearstep.storage.blocks import Bytes

BOUNCE_BYTES = 8 << 20
"""Bytes of the bounce buffers of a drive, if two extents are not more: enough to fill the queue of
a drive, since the kernel cuts them into requests of some 100 KiB."""

LEAST = 2
"""Buffers, however large: one is copied during the transfer of the other."""


class Bounces:
    """Bounce buffers of a drive: allocated on demand, freed when none is in use.

    The threads of a drive share them, so that their memory does not grow with the depth of its
    queue, and is nothing while arrays are aligned. A thread that waits for a buffer holds none.

    Parameters
    ----------
    nbytes : of each.

    Attributes
    ----------
    count : buffers that may be in use at once.
    held : buffers that are allocated.
    most : the largest `held` so far.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.count = max(LEAST, BOUNCE_BYTES // nbytes)
        self.held = self.most = 0
        self._inside = 0
        self._free: list[Bytes] = []
        self._places = threading.Semaphore(self.count)
        self._lock = threading.Lock()

    def reach(self, data: Bytes) -> AbstractContextManager[Bytes]:
        """An array itself, if it is aligned, else a buffer of its size."""
        return nullcontext(data) if is_aligned(data) else self.lend(data.nbytes)

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[Bytes]:
        """Lend an aligned array of `nbytes`, whose contents are undefined, for the context; wait
        while all buffers are in use."""
        with self._lock:
            self._inside += 1
        try:
            with self._places:
                memory = self._take()
                try:
                    yield memory[:nbytes]
                finally:
                    with self._lock:
                        self._free.append(memory)
                    del memory
        finally:
            with self._lock:
                self._inside -= 1
                if not self._inside:
                    self._free.clear()
                    self.held = 0

    def _take(self) -> Bytes:
        with self._lock:
            if self._free:
                return self._free.pop()
            self.held += 1
            self.most = max(self.most, self.held)
        return aligned_bytes(self.nbytes)
