"""Memory of an emulated device: contents, and the kernel's permission for each line."""

from __future__ import annotations

import contextlib
import mmap
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from operator import attrgetter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import OutOfBoundsError, OutOfHostMemoryError
from nearstep_sim.golden.formats_cpp import narrow32, widen32
from nearstep_sim.models.bulk import Bulk, NumpyBulk
from nearstep_spec.fp import BF16, FP16

LINE_BYTES = 64
"""State is kept by the line: the line of a DIMM, and the beat of a kernel with 16 lanes."""

FORMATS = {"fp16": FP16, "bf16": BF16}

GUARD, UNWRITTEN, WRITTEN = 0, 1, 2
"""States of a line. Reading an unwritten line and any access to a guard are faults."""

POISON = 0xFFDEADFF
"""Fill word of partly written lines: a NaN, easy to spot."""

_POISONED = np.full(LINE_BYTES // 4, POISON, np.uint32).view(np.uint8)


class Loan(NamedTuple):
    """Memory of the host in the place of memory of the device.

    Attributes
    ----------
    start, stop : addresses.
    writes : writes of the device change `data`.
    place : address of `data` in this process.
    form : format of `data`, patterns of 16 bits in the place of float32; None: the same bytes.
    """

    start: int
    stop: int
    data: NDArray[np.uint8]
    writes: bool
    place: int
    form: str | None = None

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether a range is in the loan."""
        return self.start <= address and address + nbytes <= self.stop

    def lent(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the lent bytes of a range: half as many, of patterns."""
        ratio = 1 if self.form is None else 2
        return self.data[(address - self.start) // ratio :][: nbytes // ratio]

    def bytes_of(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Return the bytes of a range as in memory: of patterns, a widened copy."""
        if self.form is None:
            return self.lent(address, nbytes)
        skipped = (address - self.start) % 4
        whole = self.lent(address - skipped, -(-(skipped + nbytes) // 4) * 4)
        wide = widen32(whole.view(np.uint16), FORMATS[self.form]).view(np.uint8)
        return wide[skipped : skipped + nbytes]

    def put(self, address: int, data: NDArray[np.uint8]) -> None:
        """Write bytes as in memory: to patterns, rounded once."""
        if self.form is None:
            self.lent(address, data.size)[:] = data
            return
        skipped = (address - self.start) % 4
        nbytes = -(-(skipped + data.size) // 4) * 4
        wide = self.bytes_of(address - skipped, nbytes)
        wide[skipped : skipped + data.size] = data
        narrow = narrow32(wide.view(np.float32), FORMATS[self.form])
        self.lent(address - skipped, nbytes)[:] = narrow.view(np.uint8)


_start = attrgetter("start")


class EmulatedMemory:
    """`capacity_bytes` of memory, whose pages the operating system allocates on first use.

    Initially all lines are guards. The Verilated device uses the same two arrays, by address.

    Parameters
    ----------
    bulk : copy functions; None is numpy.

    Attributes
    ----------
    data : NDArray[np.uint8]. Shape (capacity_bytes,).
    state : NDArray[np.uint8]. Shape (capacity_bytes / 64,): a state for each line.

    Raises
    ------
    OutOfHostMemoryError : the operating system cannot reserve the addresses.
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
        self._used = 0  # bytes from this address on are unwritten, so 0
        self._lent: list[Loan] = []  # by address
        self._places: list[tuple[int, int]] = []  # ranges of lent data in the host's memory

    def read(self, address: int, out: NDArray[np.uint8]) -> None:
        """Copy memory at `address` to `out`, regardless of its state."""
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
            loan.put(low, data[low - address : high - address])

    def place(self, address: int, nbytes: int, form: str | None = None) -> NDArray[np.uint8] | None:
        """Return the target array of a write to a non-empty range; None if not contiguous.

        Mark the lines as written: the caller fills the whole range. Memory lent in `form` is
        returned as it is: half as many bytes, patterns of 16 bits.
        """
        self._check("write", address, nbytes)
        for loan in self._loans(address, nbytes)[:1]:
            if loan.writes and loan.form in (None, form) and loan.holds(address, nbytes):
                return loan.lent(address, nbytes)
        self.settle(address, nbytes, all_loans=False)
        self.touch(address, nbytes)
        return None if self._loans(address, nbytes) else self.data[address : address + nbytes]

    def fill(self, address: int, nbytes: int, element: NDArray[np.uint8]) -> None:
        """Fill a range, a multiple of `element`, with repeated `element`.

        Filling unwritten memory with zeros takes no time and allocates no page.
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

    def lend(
        self,
        address: int,
        data: NDArray[np.uint8],
        *,
        writes: bool = False,
        form: str | None = None,
    ) -> bool:
        """Map `data` into memory at `address`, marked as written, without a copy, until
        `give_back`.

        The owner must not change the data during the loan.

        Parameters
        ----------
        writes : device writes change `data`; otherwise a write first ends the loan with a copy.
        form : `fp16` or `bf16`: `data` has patterns of as many elements as memory has float32,
            which are widened when they are read and rounded once when they are written.

        Returns
        -------
        bool : False, without effect, if `data` is lent already or overlaps lent data.
        """
        nbytes = data.size if form is None else 2 * data.size
        self._check("loan", address, nbytes)
        self.settle(address, nbytes)
        place = data.ctypes.data
        at = bisect_left(self._places, (place,))
        shared = self._places[at : at + 1] and self._places[at][0] < place + data.size
        if not data.size or shared or (at and self._places[at - 1][1] > place):
            return False
        self._places.insert(at, (place, place + data.size))
        insort(self._lent, Loan(address, address + nbytes, data, writes, place, form), key=_start)
        first, last = address // LINE_BYTES, (address + nbytes - 1) // LINE_BYTES
        self.state[first : last + 1] = WRITTEN
        self._used = max(self._used, address + nbytes)
        return True

    def give_back(self, address: int) -> None:
        """End the loan at `address`, if any.

        Mark all lines that the range touches as unwritten.
        """
        at = bisect_left(self._lent, address, key=_start)
        if at < len(self._lent) and self._lent[at].start == address:
            loan = self._lent[at]
            self._end(loan)
            self.mark(address, loan.stop - loan.start, UNWRITTEN)

    def settle(self, address: int, nbytes: int, *, all_loans: bool = True) -> None:
        """End the loans in a range, all or those not writable, and copy their data to memory."""
        for loan in self._loans(address, nbytes):
            if all_loans or not loan.writes:
                self._settle(loan)

    def _settle(self, loan: Loan) -> None:
        self._end(loan)
        whole = loan.bytes_of(loan.start, loan.stop - loan.start)
        self._bulk.copy(self.data[loan.start : loan.stop], whole)

    def form(self, address: int) -> str | None:
        """Return the format of the patterns that are lent at an address, if any."""
        return next((loan.form for loan in self._loans(address, 1)), None)

    def view(self, address: int, nbytes: int, form: str | None = None) -> NDArray[np.uint8]:
        """Return the bytes of a range: a view if all in memory or all in one loan, else a copy.

        Memory lent in `form` is returned as by `place`; other patterns as a widened copy.
        """
        loans = self._loans(address, nbytes)
        if not loans:
            return self.data[address : address + nbytes]
        if loans[0].holds(address, nbytes):
            loan = loans[0]
            as_it_is = loan.form in (None, form)
            return (loan.lent if as_it_is else loan.bytes_of)(address, nbytes)
        copy = self.data[address : address + nbytes].copy()
        for loan in loans:
            low, high = max(address, loan.start), min(address + nbytes, loan.stop)
            copy[low - address : high - address] = loan.bytes_of(low, high - low)
        return copy

    def borders(self, address: int, nbytes: int) -> list[int]:
        """Return the addresses where loans begin or end within a range."""
        edges = (edge for each in self._loans(address, nbytes) for edge in (each.start, each.stop))
        return [edge for edge in edges if address < edge < address + nbytes]

    def places(self, addresses: Sequence[int], nbytes: int) -> NDArray[np.int64]:
        """Split ranges of equal size into parts that are contiguous, in memory or in a loan, in
        each range.

        Returns
        -------
        NDArray[np.int64] : of shape (parts, 1 + ranges): the bytes of a part, and its address in
            this process for each range.
        """
        own = self.data.ctypes.data
        found = []  # of each range: first bytes of its parts, and their addresses
        for address in addresses:
            firsts, places = [0], [own + address]
            for loan in list(self._loans(address, nbytes)):
                if loan.form is not None:
                    self._settle(loan)
            for start, stop, _, _, place, _ in self._loans(address, nbytes):
                firsts += max(start - address, 0), stop - address
                places += place + max(address - start, 0), own + stop
            found.append((np.array(firsts), np.array(places)))
        cuts = np.unique(np.concatenate([*(firsts for firsts, _ in found), [nbytes]]))
        cuts = cuts[cuts <= nbytes]
        parts = np.empty((cuts.size - 1, 1 + len(found)), np.int64)
        parts[:, 0] = np.diff(cuts)
        for column, (firsts, places) in enumerate(found, 1):
            last = np.searchsorted(firsts, cuts[:-1], "right") - 1  # of equal ones, the loan
            parts[:, column] = places[last] + cuts[:-1] - firsts[last]
        return parts

    def _loans(self, address: int, nbytes: int) -> list[Loan]:
        """Return the loans that overlap a range, in order."""
        lent = self._lent
        if not lent:
            return lent
        first = bisect_right(lent, address, key=_start)
        first -= bool(first and lent[first - 1].stop > address)
        return lent[first : bisect_left(lent, address + nbytes, key=_start)]

    def _end(self, loan: Loan) -> None:
        del self._lent[bisect_left(self._lent, loan.start, key=_start)]
        del self._places[bisect_left(self._places, (loan.place,))]

    def window(self, address: int, nbytes: int) -> NDArray[np.uint8]:
        """Return a writable view of a range, without loans; the writer must `touch` it."""
        self._check("window", address, nbytes)
        self.settle(address, nbytes)
        self._used = max(self._used, address + nbytes)
        return self.data[address : address + nbytes]

    def touch(self, address: int, nbytes: int) -> None:
        """Mark the lines of a non-empty range as written, and poison their unwritten bytes outside
        of it.
        """
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
        """Set the state of all lines that a range touches."""
        self._check("mark", address, nbytes)
        if self._untouched and state == GUARD:
            return  # already in this state; a write would allocate a page for each 256 KiB
        self._untouched = False
        if state != UNWRITTEN:
            self.settle(address, nbytes)
            self._used = max(self._used, address + nbytes)
        self.state[address // LINE_BYTES : -(-(address + nbytes) // LINE_BYTES)] = state

    def first_not(self, state: int, address: int, nbytes: int) -> int | None:
        """Address of the first line of a range that is not in `state`, or None."""
        first = address // LINE_BYTES
        lines = self.state[first : -(-(address + nbytes) // LINE_BYTES)]
        if state == WRITTEN and lines.size and lines.min() == WRITTEN:  # the highest, usual
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
    """Return zeros that occupy only addresses until written."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
    try:
        pages = mmap.mmap(-1, nbytes, flags=flags)
    except (OSError, OverflowError, ValueError, MemoryError) as error:
        raise OutOfHostMemoryError(nbytes, str(error)) from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(pages, np.uint8)
