"""Memory that a client shares with the service."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.service.errors import RefusedError
from nearstep.coarse.service.messages import Attach, Detach
from nearstep.coarse.service.replies import Replies
from nearstep.coarse.service.shared_memory import PAGE_BYTES, SharedMemory

SLAB_BYTES = 4 << 20
"""Size of the segments that smaller places are cut from."""

KEPT_BYTES = 128 << 20
"""Maximum total size of free places of at least `SLAB_BYTES` that stay attached."""


@dataclass(frozen=True, eq=False)
class Allocation:
    """Bytes of a segment.

    Attributes
    ----------
    segment : number of the segment.
    offset : offset in the segment, in bytes.
    room : NDArray[np.uint8]. The whole place, of a power of two bytes.
    size : requested size, in bytes.
    """

    segment: int
    offset: int
    room: NDArray[np.uint8]
    size: int

    @property
    def data(self) -> NDArray[np.uint8]:
        """The requested bytes of the place."""
        return self.room[: self.size]


class Arena:
    """Allocator of places in memory that a client shares with the service."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._lock = threading.Lock()
        self._free: dict[int, list[Allocation]] = {}
        self._segments = 0

    def take(self, size: int) -> Allocation:
        """Allocate a place of `size` bytes; reuse a free one if possible."""
        nbytes = max(PAGE_BYTES, 1 << max(0, size - 1).bit_length())
        with self._lock:
            free = self._free.setdefault(nbytes, [])
            if not free:
                free += self._attach(nbytes)
            found = free.pop()
        return Allocation(found.segment, found.offset, found.room, size)

    def give(self, place: Allocation) -> None:
        """Free a place that neither side uses any more."""
        with self._lock:
            self._free[place.room.size].append(place)
            large = [size for size in sorted(self._free, reverse=True) if size >= SLAB_BYTES]
            kept = sum(size * len(self._free[size]) for size in large)
            for size in large:
                while kept > KEPT_BYTES and self._free[size]:
                    self._replies.send(Detach(self._free[size].pop(0).segment))
                    kept -= size

    @contextlib.contextmanager
    def borrow(self, size: int) -> Iterator[Allocation]:
        """Allocate a place for one request; after an error other than a refusal the place is not
        reused, as the service may still access it."""
        place = self.take(size)
        try:
            yield place
        except RefusedError:
            self.give(place)
            raise
        self.give(place)

    def _attach(self, nbytes: int) -> list[Allocation]:
        """Attach a new segment, and return its places of `nbytes` bytes."""
        segment = SharedMemory(max(nbytes, SLAB_BYTES))
        number, self._segments = self._segments, self._segments + 1
        try:
            descriptors = [segment.descriptor] if self._replies.is_shared else []
            self._replies.send(Attach(number, segment.data.size), descriptors=descriptors)
        finally:
            segment.close()
        return [
            Allocation(number, offset, segment.data[offset : offset + nbytes], nbytes)
            for offset in range(0, segment.data.size, nbytes)
        ]
