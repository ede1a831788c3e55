"""Arrays that start on a page, as O_DIRECT wants them."""

from __future__ import annotations

import contextlib
import math
import mmap
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


def padded(data: bytes) -> NDArray[np.uint8]:
    """A copy of `data` that starts on a page, with zeros behind it up to the end of its last."""
    held = aligned_bytes(-(-len(data) // ALIGNMENT) * ALIGNMENT)
    held[: len(data)] = np.frombuffer(data, np.uint8)
    return held


def is_aligned(data: NDArray[np.uint8]) -> bool:
    """Whether it can go to a drive as it is: whole pages, from a page on."""
    return data.nbytes % ALIGNMENT == 0 and data.ctypes.data % ALIGNMENT == 0
