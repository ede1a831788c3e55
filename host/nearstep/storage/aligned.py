"""Arrays that start on a page, as O_DIRECT wants them."""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 4096
"""Address of what is read or written without a copy: a multiple of it."""

HUGE_BYTES = 4 << 20
"""Arrays from here on have whole huge pages."""


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """An array of zeros that starts on a page; of huge pages if it is large, where the system has
    them: a drive's transfers need each page by itself."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, nbytes)


def aligned_empty(shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """An array that starts on a page: storage reads into it, and writes from it, without a copy."""
    kind = np.dtype(dtype)
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    return aligned_bytes(math.prod(dims) * kind.itemsize).view(kind).reshape(dims)


class AlignedPool:
    """Gives arrays that start on a page the memory of earlier ones that nobody refers to any more.

    New memory is zeros, which the system makes page by page when it is touched: that takes longer
    than a copy.
    """

    def __init__(self) -> None:
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)

    def empty(self, count: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """An array of shape (count,), whose contents are undefined."""
        kind = np.dtype(dtype)
        nbytes = count * kind.itemsize
        if not nbytes:
            return np.empty(0, kind)
        free = self._free[nbytes]
        memory = free.pop() if free else aligned_bytes(nbytes)
        # Views of an array refer to it as long as what it is made of is no array: its memory is
        # free when it and all of them are gone.
        array: NDArray[Any] = np.frombuffer(memory.data, kind)
        weakref.finalize(array, free.append, memory).atexit = False
        return array


def padded(data: bytes) -> NDArray[np.uint8]:
    """A copy of `data` that starts on a page, with zeros behind it up to the end of its last."""
    held = aligned_bytes(-(-len(data) // ALIGNMENT) * ALIGNMENT)
    held[: len(data)] = np.frombuffer(data, np.uint8)
    return held


def is_aligned(data: NDArray[np.uint8]) -> bool:
    """Whether it can go to a drive as it is: whole pages, from a page on."""
    return data.nbytes % ALIGNMENT == 0 and data.ctypes.data % ALIGNMENT == 0
