"""Arrays that start on a page, as O_DIRECT needs them."""

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
"""Addresses of arrays that are transferred without a copy are multiples of this."""

HUGE_BYTES = 4 << 20
"""Least size of arrays in huge pages."""


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """An array of zeros that starts on a page; a large one is in huge pages, where the system has
    them: a transfer pins each page by itself."""
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= HUGE_BYTES and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8, nbytes)


def aligned_empty(shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """An array that starts on a page, which storage transfers without a copy."""
    kind = np.dtype(dtype)
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    return aligned_bytes(math.prod(dims) * kind.itemsize).view(kind).reshape(dims)


class AlignedPool:
    """Arrays that start on a page, in memory of earlier ones that are not referenced any more.

    New memory would cost more than a copy: the system zeroes each page at its first use.
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
        # Made of a buffer, not of an array, so that views refer to this array: its memory is free
        # when it and all of its views are gone.
        array: NDArray[Any] = np.frombuffer(memory.data, kind)
        weakref.finalize(array, free.append, memory).atexit = False
        return array


def padded(data: bytes) -> NDArray[np.uint8]:
    """A copy of `data` that starts on a page, padded with zeros to whole pages."""
    held = aligned_bytes(-(-len(data) // ALIGNMENT) * ALIGNMENT)
    held[: len(data)] = np.frombuffer(data, np.uint8)
    return held


def is_aligned(data: NDArray[np.uint8]) -> bool:
    """Whether an array can be transferred as it is: whole pages, from a page on."""
    return data.nbytes % ALIGNMENT == 0 and data.ctypes.data % ALIGNMENT == 0


def flat_bytes(what: str, data: Any, *, writes: bool = False) -> NDArray[np.uint8]:
    """The bytes of a contiguous array or buffer.

    Raises
    ------
    ArgumentError : there is no such array, or it must be written and cannot be.
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
