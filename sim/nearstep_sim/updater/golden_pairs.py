"""Gradients of the functional kernel as pairs of index and value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden.rule import SparseGradient
from nearstep_sim.golden.topk import first_wrong_pair, widen
from nearstep_sim.updater.golden_command import Area, Command
from nearstep_sim.updater.golden_port import Fault, GoldenPort, Span, StoppedError
from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.updater.compression import PairCause, ValueFormat
from nearstep_spec.updater.config import ELEMENT_BYTES, INDEX
from nearstep_spec.updater.decompressor import Decompressor
from nearstep_spec.updater.registers import Compression, ErrorCause

CAUSES = {PairCause.RANGE: ErrorCause.PAIR_RANGE, PairCause.ORDER: ErrorCause.PAIR_ORDER}


@dataclass(frozen=True, eq=False)
class Taken:
    """Pairs of some elements, in the order of the indices.

    Attributes
    ----------
    index : shape (pairs,).
    value : shape (pairs,): patterns of binary32.
    """

    index: NDArray[np.uint32]
    value: NDArray[np.uint32]

    @property
    def duplicates(self) -> int:
        """Return the number of pairs overridden by a later one of the same index."""
        return int(np.count_nonzero(self.index[1:] == self.index[:-1]))

    def part(self, first: int, size: int) -> SparseGradient:
        """Indices, from `first` on, and values of elements [first, first + size)."""
        begin, end = np.searchsorted(self.index, (first, first + size))
        return SparseGradient(self.index[begin:end] - np.uint32(first), self.value[begin:end])


class GoldenPairs:
    """The pairs of one run: checked as a whole, then read again block by block.

    Parameters
    ----------
    areas : of the run; without pairs it has no areas of values and indices.

    Attributes
    ----------
    checked : whether the indices are checked.
    """

    def __init__(self, command: Command, areas: Mapping[str, Area], port: GoldenPort) -> None:
        self._command = command
        self._areas = {name: areas[name] for name in (GRADIENT, INDEX) if name in areas}
        self._widths = {name: command.bytes_of(name) for name in (GRADIENT, INDEX)}
        self._port = port
        self._block = command.config.block_elements
        self._group = 1 if command.form == Compression.FUSED else self._block
        self._moved = dict.fromkeys(self._areas, 0)  # bytes, in whole beats
        self._taken = 0  # pairs
        self.checked = not command.pairs

    def check(self) -> None:
        """Read all indices.

        Raises
        ------
        StoppedError : an index is wrong, or memory did not respond.
        MemoryFaultError
        """
        area = self._areas[INDEX]
        span = Span(area.read, area.base, area.nbytes)
        if not self._port.pass_freely([span], []):
            try:
                self._port.read(span)
            except StoppedError as stopped:
                if stopped.fault is not None:  # an earlier index may be wrong
                    known = stopped.fault.address - span.address
                    self._stop_at_wrong_pair(known // ELEMENT_BYTES)
                raise
        self._stop_at_wrong_pair(self._command.pairs)
        self.checked = True

    def spans(self, stop: int) -> list[Span]:
        """Return the unread spans for elements before `stop`; they count as read afterwards."""
        if not self._areas:
            return []
        pairs = self._before(stop)
        found = []
        for name, area in self._areas.items():
            begin = self._moved[name]
            end = min(self._port.whole(pairs * self._widths[name]), area.nbytes)
            if end > begin:
                found.append(Span(area.read, area.base + begin, end - begin))
                self._moved[name] = self._port.whole(end)
        return found

    def take(self, first: int, size: int) -> Taken:
        """Return the pairs of elements [first, first + size), which must be requested in order and
        be whole blocks, but for the end of the run."""
        if not self._areas:
            return Taken(np.empty(0, np.uint32), np.empty(0, np.uint32))
        begin, end = self._taken, self._before(first + size)
        self._taken = end
        index, value = self._indices(begin, end), self._values(begin, end)
        if self._group > 1 and (index[1:] < index[:-1]).any():
            order = np.argsort(index, kind="stable")  # the order of equal indices is preserved
            index, value = index[order], value[order]
        return Taken(index, value)

    def _stop_at_wrong_pair(self, known: int) -> None:
        index = self._indices(0, known)
        cause, position = first_wrong_pair(index, count=self._command.count, group=self._group)
        if cause != PairCause.NONE:
            area = self._areas[INDEX]
            address = area.base + ELEMENT_BYTES * position
            raise StoppedError(Fault(CAUSES[cause], area.read, address))

    def _before(self, element: int) -> int:
        """Pairs of the blocks before `element`, which ends a block or the run."""
        index = self._indices(self._taken, self._command.pairs)
        if element >= self._command.count:
            return self._command.pairs
        # Blocks are in order, but not indices within a block. A search reads few indices.
        low, high = 0, index.size
        while low < high:
            middle = (low + high) // 2
            if index[middle] < element:
                low = middle + 1
            else:
                high = middle
        return self._taken + low

    def _indices(self, begin: int, end: int) -> NDArray[np.uint32]:
        return self._data(INDEX, begin, end).view(np.uint32)

    def _values(self, begin: int, end: int) -> NDArray[np.uint32]:
        """As patterns of binary32."""
        data = self._data(GRADIENT, begin, end)
        kind = np.uint32 if self._widths[GRADIENT] == ELEMENT_BYTES else np.uint16
        return widen(data.view(kind), ValueFormat(self._command.gradient))

    def _data(self, name: str, begin: int, end: int) -> NDArray[np.uint8]:
        base, width = self._areas[name].base, self._widths[name]
        return self._port.memory.view(base + begin * width, (end - begin) * width)


class GoldenRecords(GoldenPairs):
    """The records of one run of a user's decompressor: read and decompressed as a whole.

    Parameters
    ----------
    command, areas, port : as of `GoldenPairs`.
    """

    def __init__(self, command: Command, areas: Mapping[str, Area], port: GoldenPort) -> None:
        super().__init__(command, areas, port)
        self._sent: Taken | None = None

    def take(self, first: int, size: int) -> Taken:
        """Elements [first, first + size) of which the gradient is not +0."""
        if self._sent is None:
            self._sent = self._decompressed()
        begin, end = np.searchsorted(self._sent.index, (first, first + size))
        return Taken(self._sent.index[begin:end], self._sent.value[begin:end])

    def _decompressed(self) -> Taken:
        user, count, records = self._user, self._command.count, self._command.pairs
        words, values = np.empty(0, np.uint32), np.empty(0, np.uint32)
        if records:
            words, values = self._indices(0, records), self._values(0, records)
        dense = user.dense(words, values, count)
        index = np.flatnonzero(dense)
        return Taken(index.astype(np.uint32), dense[index])

    def _stop_at_wrong_pair(self, known: int) -> None:
        position = self._user.first_wrong(self._indices(0, known), self._command.count)
        if position is not None:
            area = self._areas[INDEX]
            address = area.base + ELEMENT_BYTES * position
            raise StoppedError(Fault(ErrorCause.PAIR_RANGE, area.read, address))

    def _before(self, element: int) -> int:
        return self._command.pairs

    @property
    def _user(self) -> Decompressor:
        found = self._command.config.decompressor
        assert found is not None  # a command has no other form then
        return found
