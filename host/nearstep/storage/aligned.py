"""Page-aligned arrays for O_DIRECT."""

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

from nearstep.errors import ArgumentError

ALIGNMENT = 4096
"""Alignment in bytes of arrays that are transferred without a copy."""

HUGE_BYTES = 4 << 20
"""Smallest array in bytes for which huge pages are requested."""


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """Return a page-aligned array of zeros, in huge pages if it is large and the system has them: a
    transfer pins each page separately."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # the kernel has no huge pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, nbytes)


def aligned_empty(shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """Return a page-aligned array, which storage transfers without a copy."""
    kind = np.dtype(dtype)
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    return aligned_bytes(math.prod(dims) * kind.itemsize).view(kind).reshape(dims)


class AlignedPool:
    """Page-aligned arrays that reuse the memory of unreferenced ones.

    New memory would cost more than a copy: the system zeroes each page at its first use.

    Attributes
    ----------
    limit : bytes of memory, beyond which unreferenced arrays of other sizes are freed before new
        memory is allocated; None: never.
    """

    def __init__(self) -> None:
        self.limit: int | None = None
        self._free: defaultdict[int, list[NDArray[np.uint8]]] = defaultdict(list)
        self._bytes = 0

    def empty(self, count: int, dtype: DTypeLike = np.float32) -> NDArray[Any]:
        """Return an array of shape (count,) with undefined contents."""
        kind = np.dtype(dtype)
        nbytes = count * kind.itemsize
        if not nbytes:
            return np.empty(0, kind)
        free = self._free[nbytes]
        memory = free.pop() if free else self._new(nbytes)
        # Made from a buffer, not from an array, so that views refer to this array: its memory is
        # free when the array and all of its views have been collected.
        array: NDArray[Any] = np.frombuffer(memory.data, kind)
        weakref.finalize(array, free.append, memory).atexit = False
        return array

    def _new(self, nbytes: int) -> NDArray[np.uint8]:
        if self.limit is not None:
            for size, free in self._free.items():
                while free and self._bytes + nbytes > self.limit:
                    free.pop()
                    self._bytes -= size
        self._bytes += nbytes
        return aligned_bytes(nbytes)


def padded(data: bytes) -> NDArray[np.uint8]:
    """Return a page-aligned copy of `data`, padded with zeros to whole pages."""
    held = aligned_bytes(-(-len(data) // ALIGNMENT) * ALIGNMENT)
    held[: len(data)] = np.frombuffer(data, np.uint8)
    return held


def is_aligned(data: NDArray[np.uint8]) -> bool:
    """Return whether an array is page-aligned and has whole pages, so that no copy is needed."""
    return data.nbytes % ALIGNMENT == 0 and data.ctypes.data % ALIGNMENT == 0


def flat_bytes(what: str, data: Any, *, writes: bool = False) -> NDArray[np.uint8]:
    """Return a contiguous array or buffer as bytes, uint8.

    Raises
    ------
    ArgumentError : the array is not contiguous, holds objects, or is read-only with `writes`.
    """
    array: NDArray[Any]
    if isinstance(data, np.ndarray):
        array = data
    else:
        try:
            array = np.frombuffer(data, np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise ArgumentError(f"{what} must be an array or a buffer: {error}") from None
    if not array.flags.c_contiguous:
        raise ArgumentError(f"{what} must be contiguous, not strided {array.strides}")
    if array.dtype.hasobject:
        raise ArgumentError(f"{what} must have no objects, not {array.dtype}")
    if writes and not array.flags.writeable:
        raise ArgumentError(f"{what} must be writeable")
    flat: NDArray[np.uint8] = array.reshape(-1).view(np.uint8)
    return flat
