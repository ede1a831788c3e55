"""Parameters as one flat array, of which each card's drive has a share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Completion
from nearstep.device import Device
from nearstep.placement import Segment
from nearstep.torch.overflow.drive_segment import GRADIENTS, DriveSegment, OnDrive, Written
from nearstep.torch.overflow.held_store import HeldStore
from nearstep.torch.traffic import Traffic

COPY = "copy_"
"""Names of copies in 16 bits begin so: they last as long as an update."""


def is_state(array: str) -> bool:
    """Whether an array outlasts an update, and so lies on the drives."""
    return array not in GRADIENTS and not array.startswith(COPY)


class SharedArray(Written):
    """An array of a segment on the drives of all cards.

    What the host reads or writes of it crosses its link.
    """

    def __init__(self, segment: CardSegment, name: str) -> None:
        self._segment = segment
        self._name = name

    def read(self, start: int, out: NDArray[Any]) -> None:
        segment, stripes = self._segment, self._segment.stripes
        parts = []
        for channel, (first, last) in segment.shares(start, start + out.size):
            whole = stripes.channels == 1
            part = out if whole else np.empty(last - first, out.dtype)
            key = segment.key(self._name, channel)
            reading = segment.store.submit_read(key, part, first * out.itemsize)
            parts.append((channel, part, reading))
            segment.count_read(self._name, part.nbytes)
        for channel, part, completion in parts:
            completion.wait()
            if part is not out:
                stripes.scatter(part, out, start, channel)

    def write(self, start: int, data: NDArray[Any]) -> None:
        for completion in self.begin_write(start, data):
            completion.wait()

    def begin_write(self, start: int, data: NDArray[Any]) -> list[Completion]:
        segment = self._segment
        segment.changed(self._name)
        flat = np.ascontiguousarray(data, segment.dtype_of(self._name))
        written = []
        for channel, (first, _) in segment.shares(start, start + flat.size):
            part = segment.stripes.gather(flat, start, channel)
            key = segment.key(self._name, channel)
            written.append(segment.store.submit_write(key, part, first * part.itemsize))
            segment.count_write(self._name, part.nbytes)
        return written


class CardSegment(DriveSegment):
    """Parameters behind one another, dealt out to cards by block (section IV-D).

    Of each array every card's drive has a tensor with its share. Nothing of it stays in the memory
    of a card: subgroups come and go.

    Parameters
    ----------
    device, size, line, dtypes : as of `Segment`.
    number : of the segment, in names on the drives.
    drives : one for each card.
    traffic
    """

    def __init__(
        self,
        device: Device,
        size: int,
        line: int,
        dtypes: Mapping[str, np.dtype],
        number: int,
        drives: HeldStore,
        traffic: Traffic,
    ) -> None:
        super().__init__(device, size, line, dtypes, drives, traffic)
        self._number = number
        self.find()

    def key(self, array: str, channel: int) -> str:
        """Name of a card's share of an array."""
        return f"{self._number}.{array}@{channel}"

    def shares(self, start: int, stop: int) -> Iterator[tuple[int, tuple[int, int]]]:
        """Of elements [start, stop) those of each card that has some: first and last."""
        for channel in range(self.stripes.channels):
            first, last = self.stripes.span(start, stop, channel)
            if first < last:
                yield channel, (first, last)

    def tensors(self, array: str) -> Iterator[OnDrive]:
        for channel in range(self.stripes.channels):
            count = self.stripes.before(self._size, channel)
            yield OnDrive(self.key(array, channel), count, channel)

    def find(self) -> None:
        self.on_drives = {
            name.partition(".")[2].removesuffix("@0")
            for name in self.store.tensors
            if name.partition(".")[0] == str(self._number) and name.endswith("@0")
        }

    def elsewhere(self, array: str) -> SharedArray | None:
        return SharedArray(self, array) if array in self.on_drives else None

    def passes(self, array: str) -> bool:
        return super().passes(array) or array.startswith(COPY)


def segment_of(launched: Segment) -> CardSegment:
    """The segment of a launch, of which all are such."""
    assert isinstance(launched, CardSegment)
    return launched
