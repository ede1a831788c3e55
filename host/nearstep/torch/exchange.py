"""Blocks of a step, arrays sent to the device, and results fetched to the host."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearstep.placement import Extent, Launch, Segment, padded
from nearstep.torch import convert


class Block(NamedTuple):
    """Elements [start, stop) of a launch's segment."""

    launch: Launch
    start: int
    stop: int

    def span(self, channel: int, array: str = "p") -> tuple[int, int]:
        """Return the elements [first, last) of the channel's share of an array of the segment; of
        one in 8 bits, bytes."""
        stripes, start, stop = self.launch.segment.span(array, self.start, self.stop)
        return stripes.span(start, stop, channel)

    def has(self, channel: int) -> bool:
        """Return whether a channel has elements of the block."""
        first, last = self.span(channel)
        return first < last


Piece = Sequence[Block]
"""Blocks that a channel updates in one turn: between two changes of its mode."""


def pieces(
    launches: Iterable[Launch], elements: int | None, first: int, *, whole: bool
) -> list[list[Block]]:
    """Cut launches, in order, into pieces of at least `elements`; the last piece may have fewer.

    Cuts are at whole stripes, so that a piece has the same number of elements on each channel.

    Parameters
    ----------
    elements : at least 1. None: one piece.
    first : number of elements of the first piece.
    whole : do not cut launches.
    """
    found: list[list[Block]] = []
    left = 0
    for launch in launches:
        stripes = launch.segment.stripes
        turn = stripes.block * stripes.channels
        start = launch.start
        while start < launch.stop:
            if not found or (elements is not None and left <= 0):
                left = elements if found and elements is not None else first
                found.append([])
            end = launch.stop
            if elements is not None and not whole:
                end = min(end, -(-(start + left) // turn) * turn)
            found[-1].append(Block(launch, start, end))
            left -= end - start
            start = end
    return found


def subgroups(launches: Iterable[Launch], elements: int) -> Iterator[list[Block]]:
    """Cut launches at the multiples of `elements` of their segments; each piece is one block.

    Ref: Smart-Infinity, section V: subgroup i has the elements from i x D on.
    """
    for launch in launches:
        for start in range(launch.start // elements * elements, launch.stop, elements):
            low, high = max(start, launch.start), min(start + elements, launch.stop)
            yield [Block(launch, low, high)]


SMALL_ELEMENTS = 1 << 14
"""Arrays of fewer elements are copied together."""

TOGETHER_ELEMENTS = 1 << 20
"""Largest number of elements of neighbours that are copied together."""


class Sending(NamedTuple):
    """An array that a step sends to the device.

    Attributes
    ----------
    data : of shape (count,).
    sent : called when the device has the array.
    """

    extent: Extent
    array: str
    data: NDArray[Any]
    sent: Callable[[], None] | None = None


class Cut(NamedTuple):
    """Neighbouring arrays that are sent together to one array of the device.

    Attributes
    ----------
    start, stop : elements of the segment; whole lines, padding included.
    parts : arrays that have elements of the range.
    """

    segment: Segment
    array: str
    start: int
    stop: int
    parts: Sequence[Sending]

    def data(self, channel: int, count: int) -> NDArray[Any]:
        """Return the first `count` elements of a channel's share, read-only; padding is 0."""
        stripes = self.segment.stripes
        if stripes.channels == 1 and len(self.parts) == 1:
            extent, _, array, _ = self.parts[0]
            if extent.start <= self.start and self.stop <= extent.start + extent.count:
                return array.reshape(-1)[self.start - extent.start :][:count]
        first, last = stripes.span(self.start, self.stop, channel)
        data = np.zeros(last - first, self.segment.dtype_of(self.array))
        for extent, _, array, _ in self.parts:
            start, stop = max(extent.start, self.start), min(extent.start + extent.count, self.stop)
            part = array.reshape(-1)[start - extent.start : max(start, stop) - extent.start]
            at = stripes.before(start, channel) - first
            ours = stripes.gather(part, start, channel)
            data[at : at + ours.size] = ours
        return data[:count]


class Sends:
    """Arrays that a step sends, unchanged until `sent`.

    Parameters
    ----------
    at_once : write large arrays to the device when they are added, so that the host need not keep
        all arrays of a step; small neighbours are sent together. False: `cut` yields all arrays.
    """

    def __init__(self, *, at_once: bool = False) -> None:
        self._at_once = at_once
        self._sendings: defaultdict[tuple[Segment, str], list[Sending]] = defaultdict(list)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to send."""
        return not self._sendings

    def send(self, sending: Sending) -> None:
        """Add an array. The padding after it may be overwritten."""
        extent, array, data, sent = sending
        if extent.count and not (self._at_once and extent.count >= SMALL_ELEMENTS):
            self._sendings[extent.segment, array].append(sending)
            return
        if extent.count:
            extent.write(array, data)
        if sent is not None:
            sent()

    def sort(self) -> None:
        """Sort all added arrays by their place on the device."""
        for sendings in self._sendings.values():
            sendings.sort(key=lambda each: each.extent.start)

    def cut(self, segment: Segment, start: int, stop: int) -> Iterator[Cut]:
        """Yield what is sent of elements [start, stop) of a segment; each range begins and ends
        with an extent, or between two lines."""
        for (where, array), sendings in self._sendings.items():
            if where is not segment:
                continue
            group: list[Sending] = []
            at = bisect_left(sendings, start + 1, key=lambda each: each.extent.end)
            while at < len(sendings) and sendings[at].extent.start < stop:
                if group and not self._joins(group, sendings[at]):
                    yield _cut(segment, array, start, stop, group)
                    group = []
                group.append(sendings[at])
                at += 1
            if group:
                yield _cut(segment, array, start, stop, group)

    def _joins(self, group: Sequence[Sending], sending: Sending) -> bool:
        """Return whether a transfer of `group` can include another array, its next neighbour."""
        if group[-1].extent.end != sending.extent.start:
            return False
        size = sending.extent.end - group[0].extent.start
        return not self._at_once or size <= TOGETHER_ELEMENTS

    def sent(self) -> None:
        """Record that the device has all arrays."""
        for sendings in self._sendings.values():
            for each in sendings:
                if each.sent is not None:
                    each.sent()
        self._sendings.clear()


def send_now(fill: Callable[[Sends], None]) -> None:
    """Send the arrays that `fill` adds, one after the other."""
    sends = Sends()
    fill(sends)
    for sendings in sends._sendings.values():
        for each in sendings:
            each.extent.write(each.array, each.data)
    sends.sent()


def _nothing() -> NDArray[Any]:
    return np.empty(0, np.uint8)


def _cut(segment: Segment, array: str, start: int, stop: int, group: Sequence[Sending]) -> Cut:
    first, last = group[0].extent.start, group[-1].extent.end
    whole = padded(stop, segment.line)
    return Cut(segment, array, max(first, start), min(last, whole), tuple(group))


class Target:
    """Memory on the host for the result of one extent, which transfers fill piece by piece.

    Parameters
    ----------
    words : memory of shape (elements,), or a function that allocates it for the first transfer.
    sums : compute the fingerprint of `words`, the parameter's memory, part by part while it is
        filled.
    count, store : call `store` with the words as soon as `count` elements have been filled, then
        free the memory, so that a step need not keep all results beside the parameters.

    Attributes
    ----------
    is_stored : `store` has been called.
    """

    def __init__(
        self,
        words: NDArray[Any] | Callable[[], NDArray[Any]],
        *,
        sums: bool = False,
        count: int = 0,
        store: Callable[[NDArray[Any]], None] | None = None,
    ) -> None:
        self._words = words
        self._left = count
        self._store = store
        self.is_stored = False
        self._sums = convert.PartSums(self.words) if sums else None
        size, step = self.words.size if sums else 0, convert.SUMMED
        self._missing = [min(step, size - at) for at in range(0, size, step)]

    @property
    def words(self) -> NDArray[Any]:
        """The memory."""
        if callable(self._words):
            self._words = self._words()
        return self._words

    def filled(self, start: int, stop: int) -> None:
        """Record that elements [start, stop) have their final values."""
        if self._store is not None:
            self._left -= stop - start
            if not self._left:
                self._store(self.words)
                self._words, self._store, self.is_stored = _nothing, None, True
        if self._sums is None:
            return
        step = convert.SUMMED
        for number in range(start // step, -(-stop // step)):
            low, high = max(start, number * step), min(stop, (number + 1) * step)
            self._missing[number] -= high - low
            if not self._missing[number]:
                self._sums.make(number)

    @property
    def fingerprint(self) -> int | None:
        """`convert.fingerprint` of the array; None if unknown."""
        return None if self._sums is None or any(self._missing) else self._sums.fingerprint


class Results:
    """Results of a step that the host fetches: parameters, or 16-bit copies.

    Parameters
    ----------
    targets : memory for the extents that are fetched.
    """

    def __init__(self, targets: Mapping[Extent, Target]) -> None:
        self._targets = targets
        self._shares: Counter[tuple[Extent, int]] = Counter()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is fetched."""
        return not self._targets

    def runs(
        self, block: Block, *, alone_from: int | None
    ) -> Iterator[tuple[int, int, Sequence[Extent]]]:
        """Yield the ranges [start, stop) of a block that are fetched, with their extents.

        Parameters
        ----------
        alone_from : fetch extents of at least so many elements alone; None: fetch neighbours of any
            size together.
        """
        run: list[Extent] = []
        for extent in block.launch.extents:
            if extent.end <= block.start or extent.start >= block.stop:
                continue
            if extent not in self._targets:
                if run:
                    yield self._run(block, run)
                run = []
                continue
            alone = (
                alone_from is not None
                and max(extent.count, run[-1].count if run else 0) >= alone_from
            )
            full = alone_from is not None and run and extent.end - run[0].start > TOGETHER_ELEMENTS
            if run and (alone or full):
                yield self._run(block, run)
                run = []
            run.append(extent)
        if run:
            yield self._run(block, run)

    def _run(self, block: Block, run: Sequence[Extent]) -> tuple[int, int, Sequence[Extent]]:
        last = run[-1]
        stop = block.stop if last is block.launch.extents[-1] else min(block.stop, last.end)
        return max(block.start, run[0].start), stop, tuple(run)

    def is_whole(self, start: int, stop: int, extents: Sequence[Extent]) -> bool:
        """Return whether `memory` returns memory for these elements."""
        extent = extents[0]
        if extent.segment.stripes.channels > 1 or len(extents) > 1:
            return False
        return extent.start <= start and stop <= extent.start + extent.count

    def memory(self, start: int, stop: int, extents: Sequence[Extent]) -> NDArray[Any] | None:
        """Return memory for elements [start, stop) of a one-channel segment, if of one extent.

        Call `filled` afterwards; if the result is None, `put` for each channel's share.
        """
        if not self.is_whole(start, stop, extents):
            return None
        extent = extents[0]
        return self._targets[extent].words[start - extent.start : stop - extent.start]

    def filled(self, start: int, stop: int, extents: Sequence[Extent]) -> None:
        """Record that elements [start, stop) of a segment have their final values."""
        for extent in extents:
            low, high = max(start, extent.start), min(stop, extent.start + extent.count)
            if low < high:
                self._targets[extent].filled(low - extent.start, high - extent.start)

    def put(
        self, start: int, stop: int, extents: Sequence[Extent], channel: int, part: NDArray[Any]
    ) -> None:
        """Store a channel's share of elements [start, stop) of a segment."""
        stripes = extents[0].segment.stripes
        first, last = stripes.span(start, stop, channel)
        for extent in extents:
            low, high = max(start, extent.start), min(stop, extent.start + extent.count)
            if low < high:
                at, end = stripes.span(low, high, channel)
                out = self._targets[extent].words[low - extent.start : high - extent.start]
                if stripes.channels == 1:
                    out[:] = part[at - first : end - first]
                else:
                    stripes.scatter(part[at - first : end - first], out, low, channel)
        self._shares[extents[0], start] += last - first
        if self._shares[extents[0], start] == stop - start:
            self.filled(start, stop, extents)

    def take(self, extent: Extent, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Return a result, of shape (count,), in `out` if given; else read-only."""
        found = self._targets[extent].words
        if out is None or out.ctypes.data == found.ctypes.data:
            return found
        out[:] = found
        return out

    def is_stored(self, extent: Extent) -> bool:
        """Return whether the parameter already has the result."""
        return self._targets[extent].is_stored

    def fingerprint(self, extent: Extent) -> int | None:
        """Return `convert.fingerprint` of a result in the parameter's memory; None if unknown."""
        return self._targets[extent].fingerprint
