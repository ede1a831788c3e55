"""Arrays whose memory is used again."""

from __future__ import annotations

import weakref
from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from nearstep.allocator import LINE_BYTES


def empty(size: int) -> NDArray[np.float32]:
    """A new array of one dimension that begins a line of the cache; its contents are undefined."""
    room = np.empty(size + LINE_BYTES // 4, np.float32)
    first = -room.ctypes.data % LINE_BYTES // 4
    return room[first : first + size]


class ScratchPool:
    """Gives arrays the memory of earlier ones that nobody refers to any more.

    Large arrays that are made anew in each step would get new pages from the operating system each
    time, which fills them with zeros first: that takes as long as a pass over them.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[NDArray[np.float32]]] = defaultdict(list)

    def empty(self, size: int) -> NDArray[np.float32]:
        """An array of one dimension, whose contents are undefined."""
        free = self._free[size]
        memory = free.pop() if free else empty(size)
        # Views of an array refer to it as long as what it is made of is no array: its memory is
        # free when it and all of them are gone.
        array: NDArray[np.float32] = np.frombuffer(memory.data, np.float32)
        weakref.finalize(array, free.append, memory).atexit = False
        return array
