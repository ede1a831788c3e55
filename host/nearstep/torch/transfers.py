"""Copies of small arrays: those that lie next to each other on the device are one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from nearstep.placement import Extent

SMALL_ELEMENTS = 1 << 14
"""Arrays of fewer elements are copied together."""

TOGETHER_ELEMENTS = 1 << 20
"""Copies of more elements are not made longer."""


class Sending(NamedTuple):
    """An array on its way to the device.

    Attributes
    ----------
    extent
    array : where it goes.
    data : of shape (count,).
    sent : called when it is there.
    """

    extent: Extent
    array: str
    data: NDArray[Any]
    sent: Callable[[], None] | None = None


class Wanted(NamedTuple):
    """An array that is to be fetched."""

    extent: Extent
    array: str


Item = TypeVar("Item", Sending, Wanted)


class Outbox:
    """Arrays on their way to the device; who changes them waits for `flush`."""

    def __init__(self) -> None:
        self._waiting: list[Sending] = []

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    def send(self, sending: Sending) -> None:
        """Send an array, a small one with the next `flush`. Padding may be overwritten."""
        if sending.extent.count < SMALL_ELEMENTS:
            self._waiting.append(sending)
        else:
            _send([sending])

    def flush(self) -> None:
        """Send all that waits."""
        waiting, self._waiting = self._waiting, []
        for name in dict.fromkeys(each.array for each in waiting):
            for group in _neighbours([each for each in waiting if each.array == name]):
                _send(group)


def send_all(fill: Callable[[Outbox], None]) -> None:
    """Send at once what `fill` puts into an outbox."""
    outbox = Outbox()
    fill(outbox)
    outbox.flush()


class Inbox:
    """What a step left on the device, fetched as it is taken.

    Parameters
    ----------
    small : small arrays, in the order in which they will be taken.
    """

    def __init__(self, small: Sequence[Wanted]) -> None:
        self._small = fetch(small)

    def take(self, wanted: Wanted, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """One array, of shape (count,), into `out` if given; else to be read only."""
        if wanted.extent.count < SMALL_ELEMENTS:
            return next(self._small)
        return wanted.extent.read(wanted.array, out)

    def fingerprint(self, wanted: Wanted) -> int | None:
        """`convert.fingerprint` of an array that was taken into the parameter's memory; None if
        that is not known yet."""
        return None


def fetch(wanted: Sequence[Wanted]) -> Iterator[NDArray[Any]]:
    """The arrays, each of shape (count,), in order; to be read only."""
    for group in _neighbours(wanted):
        if len(group) == 1:
            yield group[0].extent.read(group[0].array)
            continue
        span = _span(group)
        data = span.read(group[0].array)
        for extent, _ in group:
            yield data[extent.start - span.start :][: extent.count]


def _send(group: Sequence[Sending]) -> None:
    if len(group) == 1:
        group[0].extent.write(group[0].array, group[0].data)
    else:
        span, array = _span(group), group[0].array
        data = np.zeros(span.count, span.segment.dtype_of(array))
        for extent, _, part, _ in group:
            data[extent.start - span.start :][: extent.count] = part
        span.write(array, data)
    for each in group:
        if each.sent is not None:
            each.sent()


def _span(group: Sequence[Sending] | Sequence[Wanted]) -> Extent:
    """All of some neighbours."""
    first, last = group[0].extent, group[-1].extent
    return Extent(first.segment, first.start, last.start + last.count - first.start)


def _neighbours(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Items in groups: small neighbours, in order, of one array."""
    group: list[Item] = []
    for item in items:
        if group and not _joins(group, item):
            yield group
            group = []
        group.append(item)
    if group:
        yield group


def _joins(group: Sequence[Sending] | Sequence[Wanted], item: Sending | Wanted) -> bool:
    first, last = group[0].extent, group[-1].extent
    extent = item.extent
    return (
        item.array == group[-1].array
        and extent.segment is last.segment
        and extent.start == last.end
        and extent.count < SMALL_ELEMENTS
        and last.count < SMALL_ELEMENTS
        and extent.end - first.start <= TOGETHER_ELEMENTS
    )
