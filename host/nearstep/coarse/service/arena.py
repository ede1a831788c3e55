"""The memory of a client that it shares with the service."""

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
from nearstep.coarse.service.segment import PAGE_BYTES, Segment

SLAB_BYTES = 4 << 20
"""Smaller places lie in segments of this size, many in each."""

KEPT_BYTES = 128 << 20
"""At most, of larger places that nobody has."""


@dataclass(frozen=True, eq=False)
class Place:
    """Bytes of a segment.

    Attributes
    ----------
    segment : its number.
    offset : bytes.
    room : NDArray[np.uint8]. All that there is, a power of two.
    size : what was asked for.
    """

    segment: int
    offset: int
    room: NDArray[np.uint8]
    size: int

    @property
    def data(self) -> NDArray[np.uint8]:
        """What was asked for."""
        return self.room[: self.size]


class Arena:
    """Memory that a client shares with the service, in places; those that are given back are used
    again.
    """

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._lock = threading.Lock()
        self._free: dict[int, list[Place]] = {}
        self._segments = 0

    def take(self, size: int) -> Place:
        """A place of at least so many bytes."""
        nbytes = max(PAGE_BYTES, 1 << max(0, size - 1).bit_length())
        with self._lock:
            free = self._free.setdefault(nbytes, [])
            if not free:
                free += self._attach(nbytes)
            found = free.pop()
        return Place(found.segment, found.offset, found.room, size)

    def give(self, place: Place) -> None:
        """Give a place back, that neither side uses any more."""
        with self._lock:
            self._free[place.room.size].append(place)
            large = [size for size in sorted(self._free, reverse=True) if size >= SLAB_BYTES]
            kept = sum(size * len(self._free[size]) for size in large)
            for size in large:
                while kept > KEPT_BYTES and self._free[size]:
                    self._replies.send(Detach(self._free[size].pop(0).segment))
                    kept -= size

    @contextlib.contextmanager
    def borrow(self, size: int) -> Iterator[Place]:
        """A place for one request; after an error the service may still use it."""
        place = self.take(size)
        try:
            yield place
        except RefusedError:
            self.give(place)
            raise
        self.give(place)

    def _attach(self, nbytes: int) -> list[Place]:
        """A new segment, of one place or of many."""
        segment = Segment(max(nbytes, SLAB_BYTES))
        number, self._segments = self._segments, self._segments + 1
        try:
            descriptors = [segment.descriptor] if self._replies.is_shared else []
            self._replies.send(Attach(number, segment.data.size), descriptors=descriptors)
        finally:
            segment.close()
        return [
            Place(number, offset, segment.data[offset : offset + nbytes], nbytes)
            for offset in range(0, segment.data.size, nbytes)
        ]
