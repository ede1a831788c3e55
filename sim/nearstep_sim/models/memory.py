"""Memory of an emulated device: contents, and what the kernel may do with each line of it."""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_left, bisect_right, insort
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import OutOfBoundsError, OutOfHostMemoryError
from nearstep_sim.models.bulk import Bulk, NumpyBulk

LINE_BYTES = 64
"""State is kept by the line: the line of a DIMM, and the beat of a kernel with 16 lanes."""

GUARD, UNWRITTEN, WRITTEN = 0, 1, 2
"""States of a line. Reading an unwritten line and any access to a guard are faults."""

POISON = 0xFFDEADFF
"""Word that fills the rest of a line when a part of it is written first: a NaN, easy to spot."""

_POISONED = np.full(LINE_BYTES // 4, POISON, np.uint32).view(np.uint8)


class Loan(NamedTuple):
    """Memory of the host in the place of memory of the device.

    Attributes
    ----------
    start, stop : addresses.
    writes : writes go there, too.
    """

    start: int
    stop: int
    data: NDArray[np.uint8]
    writes: bool


_start = attrgetter("start")


class EmulatedMemory:
    """`capacity_bytes` of memory, given pages by the operating system only as they are used.

    All of it is a guard at first. The Verilated device works on the same two arrays, through their
    addresses.

    Parameters
    ----------
    bulk : what copies; None is numpy.

    Attributes
    ----------
    data : NDArray[np.uint8]. Shape (capacity_bytes,).
    state : NDArray[np.uint8]. Shape (capacity_bytes / 64,): a state for each line.

    Raises
    ------
    OutOfHostMemoryError : the operating system does not give the addresses.
    """

    def __init__(self, capacity_bytes: int, bulk: Bulk | None = None) -> None:
        if capacity_bytes <= 0 or capacity_bytes % LINE_BYTES:
            raise ValueError(
                f"memory_bytes must be a positive multiple of {LINE_BYTES}, not {capacity_bytes}"
            )
        self.data = _zeros(capacity_bytes)
        self.state = _zeros(capacity_bytes // LINE_BYTES)
        self._bulk = NumpyBulk() if bulk is None else bulk
        self._untouched = True
        self._used = 0  # all bytes from here on are 0: nobody has written them
        self._lent: list[Loan] = []  # by address
        self._places: list[tuple[int, int]] = []  # of what is lent, in the host's memory

    def read(self, address: int, out: NDArray[np.uint8]) -> None:
        """Copy memory at `address` to `out`, whatever its state: the host sees it all."""
        self._check("read", address, out.size)
        self._bulk.copy(out, self.view(address, out.size))

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy `data` to memory at `address`; the lines touched count as written."""
        self._check("write", address, data.size)
        if not data.size:
            return
        place = self.place(address, data.size)
        if place is not None:
            self._bulk.copy(place, data)
            return
        self._bulk.copy(self.data[address : address + data.size], data)
        for loan in self._loans(address, data.size):
            low, high = max(address, loan.start), min(address + data.size, loan.stop)
            loan.data[low - loan.start : high - loan.start] = data[low - address : high - address]

    def place(self, address: int, nbytes: int) -> NDArray[np.uint8] | None:
        """Where a write to a non-empty range goes; None if that is not one array.

        Its lines count as written now: the caller fills all of it.
        """
        self._check("write", address, nbytes)
        for loan in self._loans(address, nbytes)[:1]:
            if loan.writes and loan.start <= address and address + nbytes <= loan.stop:
                return loan.data[address - loan.start :][:nbytes]
        self.settle(address, nbytes, all_loans=False)
        self.touch(address, nbytes)
        return None if self._loans(address, nbytes) else self.data[address : address + nbytes]

    def fill(self, address: int, nbytes: int, element: NDArray[np.uint8]) -> None:
        """Write `element` again and again, whole, to a range of its multiples.

        Zeros that are there because nobody has written to that memory yet take no time, and no page
        of the host's.
        """
        self._check("fill", address, nbytes)
        if not nbytes:
            return
        fresh = address >= self._used and self.first_not(UNWRITTEN, address, nbytes) is None
        if fresh and not element.any() and address % LINE_BYTES == 0:
            whole = nbytes // LINE_BYTES * LINE_BYTES
            self.state[address // LINE_BYTES :][: whole // LINE_BYTES] = WRITTEN
            self._used = address + whole
            address, nbytes = address + whole, nbytes - whole
            if not nbytes:
                return
        self.settle(address, nbytes)
        self.touch(address, nbytes)
        self.data[address : address + nbytes].reshape(-1, element.size)[:] = element

    def holds(self, address: int, data: NDArray[np.uint8]) -> bool:
        """Whether memory at `address` is equal to `data`."""
        self._check("comparison", address, data.size)
        return self._bulk.same(self.view(address, data.size), data)

    def lend(self, address: int, data: NDArray[np.uint8], *, writes: bool = False) -> bool:
        """Have `data` in the place of the memory at `address`, which counts as written, without a
        copy, until `give_back`.

        The owner does not change it until then.

        Parameters
        ----------
        writes : what is written goes to `data`. If not, it ends the loan first, with a copy.

        Returns
        -------
        bool : False if `data` is lent already, or shares memory with what is; nothing was done.
        """
        self._check("loan", address, data.size)
        self.settle(address, data.size)
        place = data.ctypes.data
        at = bisect_left(self._places, (place,))
        shared = self._places[at : at + 1] and self._places[at][0] < place + data.size
        if not data.size or shared or (at and self._places[at - 1][1] > place):
            return False
        self._places.insert(at, (place, place + data.size))
        insort(self._lent, Loan(address, address + data.size, data, writes), key=_start)
        first, last = address // LINE_BYTES, (address + data.size - 1) // LINE_BYTES
        self.state[first : last + 1] = WRITTEN
        self._used = max(self._used, address + data.size)
        return True

    def give_back(self, address: int) -> None:
        """End the loan at `address`, if there is one.

        Nobody has written there now: its whole lines.
        """
        at = bisect_left(self._lent, address, key=_start)
        if at < len(self._lent) and self._lent[at].start == address:
            loan = self._lent[at]
            self._end(loan)
            self.mark(address, loan.data.size, UNWRITTEN)

    def settle(self, address: int, nbytes: int, *, all_loans: bool = True) -> None:
        """Copy what of a range is lent: all of it, or what is not to be written."""
        for loan in self._loans(address, nbytes):
            if all_loans or not loan.writes:
                self._end(loan)
                self._bulk.copy(self.data[loan.start : loan.stop], loan.data)

    def view(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes of a range: memory itself, or what was lent, where one of the two has it all;
        else a copy."""
        loans = self._loans(address, nbytes)
        if not loans:
            return self.data[address : address + nbytes]
        if loans[0].start <= address and address + nbytes <= loans[0].stop:
            return loans[0].data[address - loans[0].start :][:nbytes]
        copy = self.data[address : address + nbytes].copy()
        for loan in loans:
            low, high = max(address, loan.start), min(address + nbytes, loan.stop)
            copy[low - address : high - address] = loan.data[low - loan.start : high - loan.start]
        return copy

    def borders(self, address: int, nbytes: int) -> list[int]:
        """Where loans begin or end within a range."""
        edges = (edge for each in self._loans(address, nbytes) for edge in (each.start, each.stop))
        return [edge for edge in edges if address < edge < address + nbytes]

    def _loans(self, address: int, nbytes: int) -> list[Loan]:
        """Loans that share bytes with a range, in order."""
        lent = self._lent
        if not lent:
            return lent
        first = bisect_right(lent, address, key=_start)
        first -= bool(first and lent[first - 1].stop > address)
        return lent[first : bisect_left(lent, address + nbytes, key=_start)]

    def _end(self, loan: Loan) -> None:
        del self._lent[bisect_left(self._lent, loan.start, key=_start)]
        del self._places[bisect_left(self._places, (loan.data.ctypes.data,))]

    def window(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """The bytes of a range, without loans, for somebody to write to: then they `touch` it."""
        self._check("window", address, nbytes)
        self.settle(address, nbytes)
        self._used = max(self._used, address + nbytes)
        return self.data[address : address + nbytes]

    def touch(self, address: int, nbytes: int) -> None:
        """Count the lines of a non-empty range as written, and poison what was not before and does
        not lie in it."""
        self._untouched = False
        end = address + nbytes
        self._used = max(self._used, end)
        first, last = address // LINE_BYTES, (end - 1) // LINE_BYTES
        if self.state[first] != WRITTEN:
            before = address - first * LINE_BYTES
            self.data[first * LINE_BYTES : address] = _POISONED[:before]
        if self.state[last] != WRITTEN:
            after = (last + 1) * LINE_BYTES - end
            self.data[end : end + after] = _POISONED[LINE_BYTES - after :]
        self.state[first : last + 1] = WRITTEN

    def mark(self, address: int, nbytes: int, state: int) -> None:
        """Give a state to all lines that a range touches."""
        self._check("mark", address, nbytes)
        if self._untouched and state == GUARD:
            return  # it is; to write that down would take a page for each 256 KiB
        self._untouched = False
        if state != UNWRITTEN:
            self.settle(address, nbytes)
            self._used = max(self._used, address + nbytes)
        self.state[address // LINE_BYTES : -(-(address + nbytes) // LINE_BYTES)] = state

    def first_not(self, state: int, address: int, nbytes: int) -> int | None:
        """Address of the first line of a range that is not in `state`, or None."""
        first = address // LINE_BYTES
        lines = self.state[first : -(-(address + nbytes) // LINE_BYTES)]
        if state == WRITTEN and lines.size and lines.min() == WRITTEN:  # the highest: the usual
            return None
        wrong = lines != state
        return (first + int(wrong.argmax())) * LINE_BYTES if wrong.any() else None

    def first_guard(self, address: int, nbytes: int) -> int | None:
        """Address of the first guard line of a range, or None."""
        first = address // LINE_BYTES
        lines = self.state[first : -(-(address + nbytes) // LINE_BYTES)]
        if lines.size and lines.min() > GUARD:
            return None
        guards = lines == GUARD
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
