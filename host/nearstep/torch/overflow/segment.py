"""Arrays of parameters that are updated together, in memory or on drives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.allocator import LINE_BYTES
from nearstep.backends.base import Completion
from nearstep.device import Device
from nearstep.placement import Extent, padded
from nearstep.torch.overflow.drive_segment import DriveSegment, OnDrive, Written
from nearstep.torch.overflow.held_store import HeldStore
from nearstep.torch.traffic import Traffic


class DriveArray(Written):
    """An array of a segment on the drives: of each parameter a tensor."""

    def __init__(self, segment: OverflowSegment, name: str) -> None:
        self._segment = segment
        self._name = name

    def read(self, start: int, out: NDArray[Any]) -> None:
        for completion in self.submit_read(start, out):
            completion.wait()

    def write(self, start: int, data: NDArray[Any]) -> None:
        for completion in self.begin_write(start, data):
            completion.wait()

    def begin_write(self, start: int, data: NDArray[Any]) -> list[Completion]:
        self._segment.changed(self._name)
        flat = np.ascontiguousarray(data, self._segment.dtype_of(self._name))
        written = []
        for key, first, offset, count in self._parts(start, flat.size):
            part = flat[first : first + count]
            store = self._segment.store
            written.append(store.submit_write(key, part, offset * flat.itemsize))
            self._segment.count_write(self._name, part.nbytes)
        return written

    def submit_read(self, start: int, out: NDArray[Any]) -> list[Completion]:
        """Begin to read elements from `start` on; what is between parameters stays in `out`."""
        completions = []
        for key, first, offset, count in self._parts(start, out.size):
            part = out[first : first + count]
            store = self._segment.store
            completions.append(store.submit_read(key, part, offset * out.itemsize))
            self._segment.count_read(self._name, part.nbytes)
        return completions

    def submit_write(self, number: int, data: NDArray[Any]) -> Completion:
        """Begin to write all of one parameter; `data` must not change until that has ended."""
        self._segment.count_write(self._name, data.nbytes)
        key = self._segment.key(number, self._name)
        return self._segment.store.submit_write(key, np.ascontiguousarray(data))

    def _parts(self, start: int, count: int) -> Iterator[tuple[str, int, int, int]]:
        """Of each parameter in [start, start + count): its tensor, where it begins in the range,
        and in the parameter, and elements."""
        for number, (at, own) in enumerate(self._segment.spans):
            low, high = max(at, start), min(at + own, start + count)
            if low < high:
                yield self._segment.key(number, self._name), low - start, low - at, high - low


class OverflowSegment(DriveSegment):
    """Arrays of whole parameters on drives; `allocate` makes room for them in memory.

    Parameters
    ----------
    device
    counts : elements of each parameter.
    line, dtypes : as of `Segment`.
    keys : names of the parameters on the drives.
    drives
    traffic : counters.

    Attributes
    ----------
    spans : first element and elements of each parameter.
    """

    def __init__(
        self,
        device: Device,
        counts: Sequence[int],
        line: int,
        dtypes: Mapping[str, np.dtype],
        keys: Sequence[str],
        drives: HeldStore,
        traffic: Traffic,
    ) -> None:
        self.spans: list[tuple[int, int]] = []
        size = 0
        for count in counts:
            self.spans.append((size, count))
            size += padded(count, line)
        super().__init__(device, size, line, dtypes, drives, traffic)
        self._keys = keys
        self.find()

    @property
    def has_padding(self) -> bool:
        """Whether there are elements between parameters."""
        return self._size > sum(count for _, count in self.spans)

    def key(self, number: int, array: str) -> str:
        """Name on the drives of an array of one parameter."""
        return f"{self._keys[number]}.{array}"

    def tensors(self, array: str) -> Iterator[OnDrive]:
        for number, (_, count) in enumerate(self.spans):
            yield OnDrive(self.key(number, array), count, None)

    def find(self) -> None:
        keys = set(self._keys)
        named = (name.rpartition(".") for name in self.store.tensors)
        self.on_drives = {array for key, _, array in named if key in keys}

    def nbytes(self, array: str) -> int:
        """Memory that an array takes, on the channel that has most of it."""
        channels = range(self.stripes.channels)
        most = max(self.stripes.before(self._size, channel) for channel in channels)
        size = most * self.dtype_of(array).itemsize
        return -(-size // LINE_BYTES) * LINE_BYTES

    def elsewhere(self, array: str) -> DriveArray | None:
        on_drives = array in self.on_drives and not self.has(array)
        return DriveArray(self, array) if on_drives else None

    def allocate(self, loaded: Sequence[str], made: Sequence[str]) -> None:
        """Make room in memory for arrays that are loaded whole, and for others, whose padding
        becomes zeros.

        Raises
        ------
        OutOfDeviceMemoryError
        """
        values = dict.fromkeys(made, 0.0 if self.has_padding else None)
        self._allocate({**dict.fromkeys(loaded, None), **values})

    def release(self, array: str) -> None:
        """Give up the memory of an array."""
        self._give_up([array])
        if array == "p":
            for resident in self.residents:
                resident.lose_master()

    @property
    def whole(self) -> Extent:
        """All elements."""
        return Extent(self, 0, self._size)

    @property
    def needs_master(self) -> bool:
        """Whether the device has more of a parameter than the host."""
        return not all(resident.is_on_host for resident in self.residents)
