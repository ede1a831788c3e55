"""Segments whose arrays are kept on drives, and the store that they share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearstep.allocator import LINE_BYTES
from nearstep.backends.base import ChainedCompletion, Completion
from nearstep.device import Device
from nearstep.placement import Extent, Segment, element, padded
from nearstep.storage.store import Store
from nearstep.torch.homes.errors import ResumeError
from nearstep.torch.traffic import Traffic


class HeldStore:
    """A store that a commit may leave in doubt, or that was unlocked after an error.

    Parameters
    ----------
    owns : it was opened for the optimizer alone, which closes it.
    """

    def __init__(self, store: Store, *, owns: bool) -> None:
        self.last = store
        self._owns = owns
        self._is_stale = self._is_released = False
        self._doubt: int | None = None

    @property
    def store(self) -> Store:
        """The store, open, at the last generation that counts.

        Raises
        ------
        ResumeError : another optimizer has made steps since `release`.
        StorageError
        """
        if self._is_stale:
            self._open()
        return self.last

    def _open(self) -> None:
        before = self.last
        if not self._is_released:
            self.last = Store(before.drives)
        else:
            opened = Store.open([drive.name for drive in before.drives], owner=None)
            last, found = before.generation, opened.generation
            same = opened.drives[0].header.set_id == before.drives[0].header.set_id
            if not same or found not in (last, self._doubt):
                opened.close()
                raise ResumeError(f"generation {last} of this optimizer", f"another's {found}")
            self.last = opened
        self._is_stale = self._is_released = False
        self._doubt = None

    def doubt(self, generation: int) -> None:
        """A generation may count: the drives are read again before the store is used."""
        self._is_stale, self._doubt = True, generation

    def release(self) -> None:
        """Unlock the drives, if the optimizer has opened them, until the store is used."""
        if self._owns:
            self.last.close()
            self._is_stale = self._is_released = True

    def close(self) -> None:
        """Give the drives back."""
        self.last.close()


if TYPE_CHECKING:
    from nearstep.torch.parameter import DeviceParameter

GRADIENTS = ("g", "g_fp16", "g_bf16")
"""Arrays that do not outlast a step, unless the device was told to keep gradients."""

COPY = "copy_"
"""Names of copies in 16 bits begin so: they last as long as an update."""

HELD_BACK = "error-feedback"
"""Array of what compression has not sent so far. No state of a rule can be called so."""

FILLED_ELEMENTS = 1 << 20
"""Elements that are written at once where an array is filled."""


def is_state(array: str) -> bool:
    """Whether an array outlasts an update, and so is kept on the drives."""
    return array not in GRADIENTS and not array.startswith(COPY)


class Part(NamedTuple):
    """Elements of one tensor that are in a range of an array.

    Attributes
    ----------
    key : name of the tensor.
    first : element of the tensor.
    low, high : of a tensor that has all elements in a row: elements of the range.
    channel : of a tensor that has a channel's share of the range; None of others.
    """

    key: str
    first: int
    low: int
    high: int
    channel: int | None


class StoredArray:
    """An array of a segment on the drives."""

    def __init__(self, segment: DriveSegment, name: str) -> None:
        self._segment = segment
        self._name = name

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Copy elements from `start` on to `out`, of shape (n,)."""
        for completion in self.begin_read(start, out):
            completion.wait()

    def write(self, start: int, data: NDArray[Any]) -> None:
        """Copy `data`, of shape (n,), to elements from `start` on."""
        for completion in self.begin_write(start, data):
            completion.wait()

    def begin_read(self, start: int, out: NDArray[Any]) -> list[Completion]:
        """Begin to read; elements between parameters stay as they are in `out`."""
        segment, stripes, reads = self._segment, self._segment.stripes, []
        for key, first, low, high, channel in segment.split(self._name, start, out.size):
            whole = channel is None or stripes.channels == 1
            part = out[low:high] if whole else np.empty(high - low, out.dtype)
            reading = segment.store.submit_read(key, part, first * out.itemsize)
            segment.count_read(self._name, part.nbytes)
            if not whole:
                assert channel is not None, "a share"
                put = partial(stripes.scatter, part, out, start, channel)
                reading = ChainedCompletion(reading, put)
            reads.append(reading)
        return reads

    def begin_write(self, start: int, data: NDArray[Any]) -> list[Completion]:
        """Begin to write; `data` must not change until that has ended."""
        segment, written = self._segment, []
        segment.changed(self._name)
        flat = np.ascontiguousarray(data, segment.dtype_of(self._name))
        for key, first, low, high, channel in segment.split(self._name, start, flat.size):
            part = flat[low:high]
            if channel is not None:
                part = segment.stripes.gather(flat, start, channel)
            written.append(segment.store.submit_write(key, part, first * part.itemsize))
            segment.count_write(self._name, part.nbytes)
        return written


class DriveSegment(Segment):
    """Arrays of parameters that are kept on drives.

    Parameters
    ----------
    counts : elements of each parameter.
    keys : names of the parameters on the drives.

    Attributes
    ----------
    spans : first element and elements of each parameter.
    on_drives : arrays that have tensors on the drives.
    parameters : that have their extents here.
    dirty : arrays that were written, in memory or on drives, by no step.
    unit : index among the segments of an optimizer.
    in_step : gradients that are reserved do not outlast the step.
    """

    def __init__(
        self,
        device: Device,
        counts: Sequence[int],
        line: int,
        dtypes: Mapping[str, np.dtype],
        drives: HeldStore,
        traffic: Traffic,
        keys: Sequence[str],
        unit: int,
    ) -> None:
        self._keys = keys
        self.unit = unit
        self.spans: list[tuple[int, int]] = []
        size = 0
        for count in counts:
            self.spans.append((size, count))
            size += padded(count, line)
        super().__init__(device, size, line, MappingProxyType(dict(dtypes)))
        self._drives = drives
        self._traffic = traffic
        self.parameters: list[DeviceParameter] = []
        self.dirty: set[str] = set()
        self.in_step = False
        self.on_drives: set[str] = set()
        self.find()

    @property
    def store(self) -> Store:
        """The store, open. Raises `StorageError`."""
        return self._drives.store

    @abstractmethod
    def tensors(self, array: str) -> Iterator[tuple[str, int, int | None]]:
        """Tensors of an array: name, elements, and the drive that has all of it; None: it is
        striped."""

    @abstractmethod
    def split(self, array: str, start: int, count: int) -> Iterator[Part]:
        """Tensors that have elements [start, start + count) of an array."""

    @abstractmethod
    def find(self) -> None:
        """Find the arrays that the drives have."""

    def elsewhere(self, array: str) -> StoredArray | None:
        on_drives = array in self.on_drives and not self.has(array)
        return StoredArray(self, array) if on_drives else None

    def has(self, array: str) -> bool:
        """Whether an array is in memory."""
        return array in self._arenas[0]

    def written(self, array: str) -> None:
        if array not in GRADIENTS or array in self.on_drives:
            self.changed(array)

    def changed(self, array: str) -> None:
        """An array is no more what the last generation on the drives has."""
        self.dirty.add(array)

    def count_write(self, array: str, nbytes: int) -> None:
        """Count bytes of an array that the host writes to the drives."""
        if array == HELD_BACK:
            self._traffic.residuals_to_drives += nbytes
        else:
            self._traffic.to_drives += nbytes

    def count_read(self, array: str, nbytes: int) -> None:
        """Count bytes of an array that the host reads from the drives."""
        if array == HELD_BACK:
            self._traffic.residuals_from_drives += nbytes
        else:
            self._traffic.from_drives += nbytes

    def reserve(self, arrays: Mapping[str, float], *, besides: str = "") -> None:
        """Add missing arrays, `besides` one, to the drives, with their values; in a step gradients
        are in memory already.
        """
        for name, value in arrays.items():
            passes = self.in_step and name in GRADIENTS
            if not (name in self.on_drives or name == besides or passes):
                self._add(name, value)

    def _add(self, name: str, value: float) -> None:
        dtype = self.dtype_of(name)
        for key, count, drive in self.tensors(name):
            self.store.add(key, count * dtype.itemsize, drive=drive)
        self.on_drives.add(name)
        self.changed(name)
        if value == 0.0 or self.has(name):
            return
        for key, count, _ in self.tensors(name):
            data = np.full(min(count, FILLED_ELEMENTS), element(value, dtype), dtype)
            for at in range(0, count, FILLED_ELEMENTS):
                part = data[: count - at]
                self.store.write(key, part, at * dtype.itemsize)
                self._traffic.to_drives += part.nbytes

    def remove(self, name: str) -> None:
        """Remove an array from the drives."""
        self.on_drives.discard(name)
        self.dirty.discard(name)
        for key, _, _ in self.tensors(name):
            self.store.remove(key)


class StripedSegment(DriveSegment):
    """Of each parameter and array a tensor, striped over the drives of the host.

    `allocate` makes room for whole arrays in memory.
    """

    @property
    def has_padding(self) -> bool:
        """Whether there are elements between parameters."""
        return self._size > sum(count for _, count in self.spans)

    def tensors(self, array: str) -> Iterator[tuple[str, int, int | None]]:
        for key, (_, count) in zip(self._keys, self.spans, strict=True):
            yield f"{key}.{array}", count, None

    def split(self, array: str, start: int, count: int) -> Iterator[Part]:
        for key, (at, own) in zip(self._keys, self.spans, strict=True):
            low, high = max(at, start), min(at + own, start + count)
            if low < high:
                yield Part(f"{key}.{array}", low - at, low - start, high - start, None)

    def find(self) -> None:
        keys = set(self._keys)
        named = (name.rpartition(".") for name in self.store.tensors)
        self.on_drives = {array for key, _, array in named if key in keys}

    def nbytes(self, array: str) -> int:
        """Memory that an array takes, on the channel that has most of it."""
        channels = range(self.stripes.channels)
        most = max(self.stripes.before(self._size, channel) for channel in channels)
        return padded(most * self.dtype_of(array).itemsize, LINE_BYTES)

    def allocate(self, loaded: Sequence[str], made: Sequence[str]) -> None:
        """Allocate memory for arrays that are loaded whole, and for others, whose padding becomes
        zeros.
        """
        values = dict.fromkeys(made, 0.0 if self.has_padding else None)
        self._allocate({**dict.fromkeys(loaded, None), **values})

    def release(self, array: str) -> None:
        """Free the memory of an array."""
        self._give_up([array])
        if array == "p":
            for parameter in self.parameters:
                parameter.lose_master()

    @property
    def whole(self) -> Extent:
        """All elements."""
        return Extent(self, 0, self._size)

    @property
    def needs_master(self) -> bool:
        """Whether the device has more of a parameter than the host."""
        return not all(parameter.is_on_host for parameter in self.parameters)


class ShardedSegment(DriveSegment):
    """Parameters behind one another, sharded over cards by block (section IV-D).

    Of each array every card's drive has a tensor with its share. Nothing is kept in the memory of a
    card: subgroups are loaded, updated and stored.

    The store has a drive for each card.
    """

    def key(self, array: str, channel: int) -> str:
        """Name of a card's share of an array."""
        return f"{self.unit}.{array}@{channel}"

    def tensors(self, array: str) -> Iterator[tuple[str, int, int | None]]:
        for channel in range(self.stripes.channels):
            count = self.stripes.before(self._size, channel)
            yield self.key(array, channel), count, channel

    def split(self, array: str, start: int, count: int) -> Iterator[Part]:
        for channel in range(self.stripes.channels):
            first, last = self.stripes.span(start, start + count, channel)
            if first < last:
                yield Part(self.key(array, channel), first, 0, last - first, channel)

    def find(self) -> None:
        self.on_drives = {
            name.partition(".")[2].removesuffix("@0")
            for name in self.store.tensors
            if name.partition(".")[0] == str(self.unit) and name.endswith("@0")
        }

    def reserve(self, arrays: Mapping[str, float], *, besides: str = "") -> None:
        kept = {name: value for name, value in arrays.items() if not name.startswith(COPY)}
        super().reserve(kept, besides=besides)
