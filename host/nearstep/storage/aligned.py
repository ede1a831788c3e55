"""Arrays that start on a page, as O_DIRECT wants them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

ALIGNMENT = 4096
"""Address of what is read or written without a copy: a multiple of it."""


def aligned_bytes(nbytes: int) -> NDArray[np.uint8]:
    """An array of zeros that starts on a page."""
    return np.frombuffer(mmap.mmap(-1, max(nbytes, 1)), np.uint8, nbytes)


def aligned_empty(shape: int | Sequence[int], dtype: DTypeLike = np.float32) -> NDArray[Any]:
    """An array that starts on a page: storage reads into it, and writes from it, without a copy."""
    kind = np.dtype(dtype)
    dims = (shape,) if isinstance(shape, int) else tuple(shape)
    return aligned_bytes(math.prod(dims) * kind.itemsize).view(kind).reshape(dims)


def is_aligned(data: NDArray[np.uint8]) -> bool:
    """Whether it can go to a drive as it is: whole pages, from a page on."""
    return data.nbytes % ALIGNMENT == 0 and data.ctypes.data % ALIGNMENT == 0
