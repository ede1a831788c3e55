"""Memory of an emulated device: contents, and what the kernel may do with each line of it."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import OutOfBoundsError, OutOfHostMemoryError

LINE_BYTES = 64
"""State is kept by the line: the line of a DIMM, and the beat of a kernel with 16 lanes."""

GUARD, UNWRITTEN, WRITTEN = 0, 1, 2
"""States of a line. Reading an unwritten line and any access to a guard are faults."""

POISON = 0xFFDEADFF
"""Word that fills the rest of a line when a part of it is written first: a NaN, easy to spot."""


class EmulatedMemory:
    """``capacity_bytes`` of memory, given pages by the operating system only as they are used.

    All of it is a guard at first. The Verilated device works on the same two arrays, through their
    addresses.

    Attributes
    ----------
    data: NDArray[np.uint8]
        Shape (capacity_bytes,).
    state: NDArray[np.uint8]
        Shape (capacity_bytes / 64,): a state for each line.

    Raises
    ------
    OutOfHostMemoryError
        The operating system does not give the addresses.
    """

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes <= 0 or capacity_bytes % LINE_BYTES:
            raise ValueError(
                f"memory_bytes must be a positive multiple of {LINE_BYTES}, not {capacity_bytes}"
            )
        self.data = _zeros(capacity_bytes)
        self.state = _zeros(capacity_bytes // LINE_BYTES)
        self._untouched = True

    def read(self, address: int, out: NDArray[np.uint8]) -> None:
        """Copy memory at ``address`` to ``out``, whatever its state: the host sees it all."""
        self._check("read", address, out.size)
        out[:] = self.data[address : address + out.size]

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy ``data`` to memory at ``address``; the lines touched count as written."""
        self._check("write", address, data.size)
        if not data.size:
            return
        self.touch(address, data.size)
        self.data[address : address + data.size] = data

    def touch(self, address: int, nbytes: int) -> None:
        """Count the lines of a non-empty range as written, and poison what was not before."""
        self._untouched = False
        first, last = address // LINE_BYTES, (address + nbytes - 1) // LINE_BYTES
        for line in {first, last}:
            if self.state[line] != WRITTEN:
                start = line * LINE_BYTES
                self.data[start : start + LINE_BYTES].view(np.uint32)[:] = POISON
        self.state[first : last + 1] = WRITTEN

    def mark(self, address: int, nbytes: int, state: int) -> None:
        """Give a state to all lines that a range touches."""
        self._check("mark", address, nbytes)
        if self._untouched and state == GUARD:
            return  # it is; to write that down would take a page for each 256 KiB
        self._untouched = False
        self.state[address // LINE_BYTES : -(-(address + nbytes) // LINE_BYTES)] = state

    def first_not(self, state: int, address: int, nbytes: int) -> int | None:
        """Address of the first line of a range that is not in ``state``, or None."""
        first = address // LINE_BYTES
        lines = self.state[first : -(-(address + nbytes) // LINE_BYTES)]
        wrong = lines != state
        return (first + int(wrong.argmax())) * LINE_BYTES if wrong.any() else None

    def first_guard(self, address: int, nbytes: int) -> int | None:
        """Address of the first guard line of a range, or None."""
        first = address // LINE_BYTES
        guards = self.state[first : -(-(address + nbytes) // LINE_BYTES)] == GUARD
        return (first + int(guards.argmax())) * LINE_BYTES if guards.any() else None

    def _check(self, what: str, address: int, nbytes: int) -> None:
        if address < 0 or address + nbytes > self.data.size:
            raise OutOfBoundsError(f"memory {what}", address, address + nbytes, self.data.size)


def _zeros(nbytes: int) -> NDArray[np.uint8]:
    """Zeros that take addresses alone until they are written, however many."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        pages = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, OverflowError, ValueError, MemoryError) as error:
        raise OutOfHostMemoryError(nbytes, str(error)) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
