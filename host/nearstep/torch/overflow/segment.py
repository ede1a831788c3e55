"""Arrays of parameters that are updated together, in memory or on drives."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearstep.allocator import LINE_BYTES
from nearstep.backends.base import Completion
from nearstep.device import Device
from nearstep.placement import Elsewhere, Extent, Segment, element, padded
from nearstep.storage.store import Store
from nearstep.torch.traffic import Traffic

if TYPE_CHECKING:
    from nearstep.torch.resident import Resident

GRADIENTS = ("g", "g_fp16", "g_bf16")
"""Arrays that do not outlast a step, unless the device was told to keep gradients."""


class DriveArray(Elsewhere):
    """An array of a segment on the drives: of each parameter a tensor."""

    def __init__(self, segment: OverflowSegment, name: str) -> None:
        self._segment = segment
        self._name = name

    def read(self, start: int, out: NDArray[Any]) -> None:
        for completion in self.submit_read(start, out):
            completion.wait()

    def write(self, start: int, data: NDArray[Any]) -> None:
        self._segment.changed(self._name)
        flat = np.ascontiguousarray(data, self._segment.dtype_of(self._name))
        for key, first, offset, count in self._parts(start, flat.size):
            part = flat[first : first + count]
            self._segment.store.write(key, part, offset * flat.itemsize)
            self._segment.traffic.to_drives += part.nbytes

    def submit_read(self, start: int, out: NDArray[Any]) -> list[Completion]:
        """Begin to read elements from `start` on; what is between parameters stays in `out`."""
        completions = []
        for key, first, offset, count in self._parts(start, out.size):
            part = out[first : first + count]
            store = self._segment.store
            completions.append(store.submit_read(key, part, offset * out.itemsize))
            self._segment.traffic.from_drives += part.nbytes
        return completions

    def submit_write(self, number: int, data: NDArray[Any]) -> Completion:
        """Begin to write all of one parameter; `data` must not change until that has ended."""
        self._segment.traffic.to_drives += data.nbytes
        key = self._segment.key(number, self._name)
        return self._segment.store.submit_write(key, np.ascontiguousarray(data))

    def _parts(self, start: int, count: int) -> Iterator[tuple[str, int, int, int]]:
        """Of each parameter in [start, start + count): its tensor, where it begins in the range,
        and in the parameter, and elements."""
        for number, (at, own) in enumerate(self._segment.spans):
            low, high = max(at, start), min(at + own, start + count)
            if low < high:
                yield self._segment.key(number, self._name), low - start, low - at, high - low


class OverflowSegment(Segment):
    """Arrays that are reserved lie on drives; `allocate` makes room for them in memory.

    Parameters
    ----------
    device
    counts : elements of each parameter.
    line, dtypes : as of `Segment`.
    keys : names of the parameters on the drives.
    store
    traffic : counters.

    Attributes
    ----------
    spans : first element and elements of each parameter.
    on_drives : arrays that have tensors on the drives.
    residents : the parameters.
    dirty : arrays that were written, in memory or on drives, by no step.
    unit : index among the segments of an optimizer.
    in_step : gradients that are reserved do not outlast it.
    """

    def __init__(
        self,
        device: Device,
        counts: Sequence[int],
        line: int,
        dtypes: Mapping[str, np.dtype],
        keys: Sequence[str],
        store: Store,
        traffic: Traffic,
    ) -> None:
        self.spans: list[tuple[int, int]] = []
        size = 0
        for count in counts:
            self.spans.append((size, count))
            size += padded(count, line)
        super().__init__(device, size, line, dtypes)
        self.store = store
        self.traffic = traffic
        self.residents: list[Resident] = []
        self.dirty: set[str] = set()
        self.unit = -1
        self.in_step = False
        self._keys = keys
        self.on_drives: set[str] = set()
        self.find()

    @property
    def has_padding(self) -> bool:
        """Whether there are elements between parameters."""
        return self._size > sum(count for _, count in self.spans)

    def key(self, number: int, array: str) -> str:
        """Name on the drives of an array of one parameter."""
        return f"{self._keys[number]}.{array}"

    def find(self) -> None:
        """See which arrays the drives have."""
        keys = set(self._keys)
        named = (name.rpartition(".") for name in self.store.tensors)
        self.on_drives = {array for key, _, array in named if key in keys}

    def nbytes(self, array: str) -> int:
        """Memory that an array takes, on the channel that has most of it."""
        channels = range(self.stripes.channels)
        most = max(self.stripes.before(self._size, channel) for channel in channels)
        size = most * self.dtype_of(array).itemsize
        return -(-size // LINE_BYTES) * LINE_BYTES

    def has(self, array: str) -> bool:
        """Whether an array is in memory."""
        return array in self._arenas[0]

    def elsewhere(self, array: str) -> DriveArray | None:
        on_drives = array in self.on_drives and not self.has(array)
        return DriveArray(self, array) if on_drives else None

    def written(self, array: str) -> None:
        if array not in GRADIENTS or array in self.on_drives:
            self.changed(array)

    def changed(self, array: str) -> None:
        """An array is no more what the last generation on the drives has."""
        self.dirty.add(array)

    def reserve(self, arrays: Mapping[str, float], *, besides: str = "") -> None:
        """Have arrays on the drives, `besides` one, with their values; in a step gradients are in
        memory already.

        Raises
        ------
        StorageError
        """
        for name, value in arrays.items():
            kept = name in self.on_drives or name == besides
            if not kept and not (self.in_step and name in GRADIENTS):
                self._add(name, value)

    def _add(self, name: str, value: float) -> None:
        dtype = self.dtype_of(name)
        for number, (_, count) in enumerate(self.spans):
            self.store.add(self.key(number, name), count * dtype.itemsize)
        self.on_drives.add(name)
        self.changed(name)
        if value == 0.0 or self.has(name):
            return
        for number, (_, count) in enumerate(self.spans):
            data = np.full(count, element(value, dtype), dtype)
            DriveArray(self, name).submit_write(number, data).wait()

    def remove(self, name: str) -> None:
        """The drives need not have an array any more."""
        self.on_drives.discard(name)
        self.dirty.discard(name)
        for number in range(len(self.spans)):
            self.store.remove(self.key(number, name))

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
