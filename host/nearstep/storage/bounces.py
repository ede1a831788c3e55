"""Bounce buffers for arrays that O_DIRECT cannot transfer."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from nearstep.storage.aligned import aligned_bytes, is_aligned
from nearstep.storage.blocks import Bytes

BOUNCE_BYTES = 8 << 20
"""Default bytes of a drive's bounce buffers: enough to fill its queue, since the kernel splits
transfers into requests of some 100 KiB."""

LEAST = 2
"""Least number of buffers: one is copied during the transfer of the other."""


class Bounces:
    """Bounce buffers of a drive: allocated on demand, and kept unless they are larger than
    `BOUNCE_BYTES` together.

    All threads of the drive share the buffers, so memory does not grow with the queue depth, and is
    zero while arrays are aligned. A thread that waits for a buffer holds none. New memory would
    cost more than the copy: the system zeroes each page at its first use.

    Parameters
    ----------
    nbytes : of each buffer.

    Attributes
    ----------
    count : most buffers in use at once.
    held : buffers that are allocated.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.count = max(LEAST, BOUNCE_BYTES // nbytes)
        self.held = 0
        self._free: list[Bytes] = []
        self._places = threading.Semaphore(self.count)
        self._lock = threading.Lock()

    def reach(self, data: Bytes) -> AbstractContextManager[Bytes]:
        """Return a context with the array itself if it is aligned, else with a buffer of its
        size."""
        return nullcontext(data) if is_aligned(data) else self.lend(data.nbytes)

    @contextmanager
    def lend(self, nbytes: int) -> Iterator[Bytes]:
        """Lend an aligned array of `nbytes` with undefined contents for the context; wait while all
        buffers are in use."""
        with self._places:
            memory = self._take()
            try:
                yield memory[:nbytes]
            finally:
                with self._lock:
                    if self.held * self.nbytes > BOUNCE_BYTES:
                        self.held -= 1
                    else:
                        self._free.append(memory)
                del memory

    def _take(self) -> Bytes:
        with self._lock:
            if self._free:
                return self._free.pop()
            self.held += 1
        return aligned_bytes(self.nbytes)
