"""Memory that data take on their way between a drive and arrays that it cannot reach."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import Bytes

BOUNCE_BYTES = 8 << 20
"""What the bounce buffers of a drive have together, if two extents are not more. A drive that is
given so much has its queue full: the kernel cuts it into requests of some 100 KiB."""

LEAST = 2
"""Buffers, however large: one is copied while the other is on the way."""


class Bounces:
    """Bounce buffers of a drive: made when they are needed, kept while any is, and given back.

    The threads of a drive share them, so that what they hold does not grow with the depth of its
    queue, and is nothing while data go to and from arrays that the drive reaches. One that waits
    holds none, and whoever holds one waits for the drive alone.

    Parameters
    ----------
    nbytes : of each.

    Attributes
    ----------
    count : buffers that may be in use at once.
    held : buffers that there are.
    most : that there were at once.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.count = max(LEAST, BOUNCE_BYTES // nbytes)
        self.held = self.most = 0
        self._inside = 0
        self._free: list[Bytes] = []
        self._places = threading.Semaphore(self.count)
        self._lock = threading.Lock()

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[Bytes]:
        """An aligned array of `nbytes`, whose contents are undefined, until the context ends.

        Waits while all buffers are in use.

        Parameters
        ----------
        nbytes : at most those of a buffer.
        """
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
