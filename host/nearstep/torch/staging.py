"""Arrays of the host that wait for the transfers of a step, and that its transfers leave."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearstep.buffer import Buffer
from nearstep.placement import Extent, Launch, Segment, padded
from nearstep.torch.transfers import Inbox, Outbox, Sending, Wanted


class Transfer(NamedTuple):
    """Neighbours that go to one array together.

    Attributes
    ----------
    segment
    array
    start, stop : elements of the segment; whole lines, padding included.
    parts : what is in them.
    """

    segment: Segment
    array: str
    start: int
    stop: int
    parts: Sequence[Sending]

    def room(self, channel: int) -> Buffer | None:
        """Where that of a channel goes; None if there is nothing."""
        first, last = self.segment.stripes.span(self.start, self.stop, channel)
        return self.segment.arenas[channel][self.array][first:last] if first < last else None

    def data(self, channel: int) -> NDArray[Any]:
        """What goes to `room`, to be read only; padding is 0."""
        stripes = self.segment.stripes
        if stripes.channels == 1 and len(self.parts) == 1:
            extent, _, array, _ = self.parts[0]
            if extent.start <= self.start and self.stop <= extent.start + extent.count:
                flat = array.reshape(-1)
                return flat[self.start - extent.start : self.stop - extent.start]
        first, last = stripes.span(self.start, self.stop, channel)
        data = np.zeros(last - first, self.segment.dtype_of(self.array))
        for extent, _, array, _ in self.parts:
            start, stop = max(extent.start, self.start), min(extent.start + extent.count, self.stop)
            part = array.reshape(-1)[start - extent.start : max(start, stop) - extent.start]
            at = stripes.before(start, channel) - first
            ours = stripes.gather(part, start, channel)
            data[at : at + ours.size] = ours
        return data


class DeferredOutbox(Outbox):
    """Arrays that a step sends when it can: `cut` says what is there."""

    def __init__(self) -> None:
        super().__init__()
        self._sendings: defaultdict[tuple[Segment, str], list[Sending]] = defaultdict(list)

    @property
    def is_empty(self) -> bool:
        return not self._sendings

    def send(self, sending: Sending) -> None:
        if sending.extent.count:
            self._sendings[sending.extent.segment, sending.array].append(sending)
        elif sending.sent is not None:
            sending.sent()

    def sort(self) -> None:
        """All is there."""
        for sendings in self._sendings.values():
            sendings.sort(key=lambda each: each.extent.start)

    def cut(self, segment: Segment, start: int, stop: int) -> Iterator[Transfer]:
        """What goes to elements [start, stop) of a segment: they begin and end with an extent, or
        between two lines."""
        for (where, array), sendings in self._sendings.items():
            if where is not segment:
                continue
            group: list[Sending] = []
            at = bisect_left(sendings, start + 1, key=lambda each: each.extent.end)
            while at < len(sendings) and sendings[at].extent.start < stop:
                if group and group[-1].extent.end != sendings[at].extent.start:
                    yield _transfer(segment, array, start, stop, group)
                    group = []
                group.append(sendings[at])
                at += 1
            if group:
                yield _transfer(segment, array, start, stop, group)

    def sent(self) -> None:
        """All is on the device."""
        for sendings in self._sendings.values():
            for each in sendings:
                if each.sent is not None:
                    each.sent()


def _transfer(
    segment: Segment, array: str, start: int, stop: int, group: Sequence[Sending]
) -> Transfer:
    first, last = group[0].extent.start, group[-1].extent.end
    whole = padded(stop, segment.line)
    return Transfer(segment, array, max(first, start), min(last, whole), tuple(group))


class Landing(Inbox):
    """What the transfers of a step leave, by launch and channel, until it is taken.

    The host's parameters have it when the whole step has been made, not before.
    """

    def __init__(self) -> None:
        super().__init__(())
        self._launches: dict[Extent, Launch] = {}
        self._rooms: dict[tuple[Launch, int], NDArray[Any]] = {}

    def add(self, launch: Launch, array: str) -> None:
        """Make room for an array of a launch."""
        for extent in launch.extents:
            self._launches[extent] = launch
        for channel in launch.parts:
            first, last = _span(launch, launch.start, launch.stop, channel)
            self._rooms[launch, channel] = np.empty(last - first, launch.segment.dtype_of(array))

    def room(self, launch: Launch, start: int, stop: int, channel: int) -> NDArray[Any]:
        """For elements [start, stop) of the segment, in whole lines, those of a channel."""
        base, _ = _span(launch, launch.start, launch.stop, channel)
        first, last = _span(launch, start, stop, channel)
        return self._rooms[launch, channel][first - base : last - base]

    def take(self, wanted: Wanted, out: NDArray[Any] | None = None) -> NDArray[Any]:
        extent = wanted.extent
        if out is None:
            out = np.empty(extent.count, extent.segment.dtype_of(wanted.array))
        if not extent.count:
            return out
        launch, stripes = self._launches[extent], extent.segment.stripes
        for channel in launch.parts:
            base, _ = stripes.span(launch.start, launch.stop, channel)
            first, last = stripes.span(extent.start, extent.start + extent.count, channel)
            part = self._rooms[launch, channel][first - base : last - base]
            if stripes.channels == 1:
                out[:] = part
            elif part.size:
                stripes.scatter(part, out, extent.start, channel)
        return out


def _span(launch: Launch, start: int, stop: int, channel: int) -> tuple[int, int]:
    """Elements of a channel that are [start, stop) of the segment, to the end of a line."""
    segment = launch.segment
    return segment.stripes.span(start, padded(stop, segment.line), channel)
