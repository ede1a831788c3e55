"""Copies and comparisons of large arrays of bytes, in C++ or in numpy."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.verilate.abi import load
from nearstep_sim.verilate.build import compile_library

SOURCE = Path(__file__).with_name("bulk.cpp")
LARGE_BYTES = 1 << 16
"""Least bytes of a copy that bypasses the caches."""

_COMPARED = 1 << 17
"""Bytes that numpy compares at a time, so that the result fits the cache."""


class Bulk(Protocol):
    """Copies and comparisons of byte arrays of equal size."""

    def same(self, one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
        """Whether both are equal."""

    def copy(self, out: NDArray[np.uint8], data: NDArray[np.uint8]) -> None:
        """Copy `data` to `out`."""


class NumpyBulk:
    """`Bulk` in numpy."""

    def same(self, one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
        return all(
            np.array_equal(_words(one[at : at + _COMPARED]), _words(other[at : at + _COMPARED]))
            for at in range(0, one.size, _COMPARED)
        )

    def copy(self, out: NDArray[np.uint8], data: NDArray[np.uint8]) -> None:
        out[:] = data


class NativeBulk(NumpyBulk):
    """`Bulk` in C++: half the time if memory bandwidth is the limit; arrays must be contiguous."""

    def __init__(self, library: Path) -> None:
        self._library = load(library, SOURCE)

    def same(self, one: NDArray[np.uint8], other: NDArray[np.uint8]) -> bool:
        return bool(self._library.bulk_same(one.ctypes.data, other.ctypes.data, one.size))

    def copy(self, out: NDArray[np.uint8], data: NDArray[np.uint8]) -> None:
        if data.size < LARGE_BYTES or np.may_share_memory(out, data):
            out[:] = data
        else:
            self._library.bulk_copy(out.ctypes.data, data.ctypes.data, data.size)


@cache
def native_bulk() -> Bulk:
    """Return the compiled version, built on first use and cached."""
    return NativeBulk(compile_library("bulk", [SOURCE]))


def _words(data: NDArray[np.uint8]) -> NDArray[np.unsignedinteger]:
    """View the bytes as fewer, larger elements."""
    return data if data.size % 8 else data.view(np.uint64)
