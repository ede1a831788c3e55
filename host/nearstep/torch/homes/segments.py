"""Segments whose arrays are kept on drives, and their common store."""

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
from nearstep.placement import Extent, Segment, padded
from nearstep.smartssd.device import SmartssdDevice
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.store import Store
from nearstep.torch.exchange import SMALL_ELEMENTS
from nearstep.torch.homes.errors import ResumeError
from nearstep.torch.traffic import Traffic


class HeldStore:
    """A store whose last commit may be in doubt, or whose drives were unlocked after an error.

    Parameters
    ----------
    owns : the store was opened for the optimizer, which closes it.
    """

    def __init__(self, store: Store, *, owns: bool) -> None:
        self.last = store
        self._owns = owns
        self._is_stale = self._is_released = False
        self.own()

    @property
    def store(self) -> Store:
        """The open store, at the last valid generation.

        Raises
        ------
        ResumeError : another optimizer has made steps since `release`.
        StorageError
        """
        if self._is_stale:
            self._open()
        return self.last

    def _open(self) -> None:
        before, last = self.last, self.last.generation
        opened = self._opened(None)
        if opened.generation in [each for each in before.generations if each > last]:
            if self._is_released:
                opened.close()
            opened = self._opened(last)  # the optimizer did not resume from the newer one
        if self._is_released:
            if opened.superblock not in (before.superblock, before.written):
                opened.close()
                raise _of_another(last, opened)
        for name, number in opened.kept.items():
            if number <= last and before.kept.get(name) != number:
                opened.drop(name)  # as the program did since the last commit
        self.last = opened
        self._is_stale = self._is_released = False
        self.own()

    def _opened(self, generation: int | None) -> Store:
        if not self._is_released:
            return Store(self.last.drives, generation=generation)
        names = [drive.name for drive in self.last.drives]
        return Store.open(names, owner=None, generation=generation)

    def own(self) -> None:
        """Note that the last generation is of this optimizer."""
        self._number, self._made = self.last.generation, self.last.meta.get("made")

    def check(self) -> None:
        """Raise `ResumeError` if another optimizer has made steps on the store; commits of the
        program make none."""
        if not self._is_stale and self.last.meta.get("made") not in (None, self._made):
            raise _of_another(self._number, self.last)

    def doubt(self) -> None:
        """Mark the last commit as perhaps made: read the drives again before the next use."""
        self._is_stale = True

    def release(self) -> None:
        """Unlock the drives until the next use of the store, if the optimizer opened them."""
        if self._owns:
            self.last.close()
            self._is_stale = self._is_released = True

    def close(self) -> None:
        """Close the store."""
        self.last.close()


def _of_another(own: int, found: Store) -> ResumeError:
    return ResumeError(f"generation {own} of this optimizer", f"another's {found.generation}")


if TYPE_CHECKING:
    from nearstep.torch.parameter import DeviceParameter

GRADIENTS = ("g", "g_fp16", "g_bf16")
"""Arrays that do not outlast a step, unless the device keeps gradients."""

COPY = "copy_"
"""Prefix of the names of 16-bit copies, which do not outlast an update."""

HELD_BACK = "error-feedback"
"""Array of the residuals of compression. No state of a rule can have this name."""


def is_state(array: str) -> bool:
    """Return whether an array outlasts an update, so that the drives keep it."""
    return array not in GRADIENTS and not array.startswith(COPY)


def extents_of(subgroup_bytes: int, most: int) -> int:
    """Return the bytes of extents, at most `most`, that the subgroups of an array consist of, or of
    a block: an extent that is written in part is read first."""
    whole, rest = divmod(subgroup_bytes, BLOCK_BYTES)
    if rest:
        return BLOCK_BYTES
    return BLOCK_BYTES * next(
        each for each in range(min(most // BLOCK_BYTES, whole), 0, -1) if whole % each == 0
    )


class Part(NamedTuple):
    """Elements of one tensor that belong to a range of an array.

    Attributes
    ----------
    key : name of the tensor.
    first : first element in the tensor.
    low, high : elements [low, high) of the range, if the tensor has them contiguously.
    channel : channel whose share of the range the tensor has; None: the tensor is contiguous.
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
        """Read elements from `start` on into `out`, of shape (n,)."""
        for completion in self.begin_read(start, out):
            completion.wait()

    def write(self, start: int, data: NDArray[Any]) -> None:
        """Write `data`, of shape (n,), to elements from `start` on."""
        for completion in self.begin_write(start, data):
            completion.wait()

    def holds(self, start: int, data: NDArray[Any]) -> bool:
        """Return whether the last generation has `data`, of shape (n,), as the elements of whole
        tensors from `start` on, by their CRCs."""
        segment = self._segment
        parts = segment.split(self._name, start, data.size)
        return all(segment.store.holds(each.key, data[each.low : each.high]) for each in parts)

    def begin_read(self, start: int, out: NDArray[Any]) -> list[Completion]:
        """Begin to read; elements of `out` between parameters are unchanged."""
        segment, reads = self._segment, []
        stripes = segment.stripes_of(self._name)
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
        """Begin to write; `data` must not change before the end."""
        segment, written = self._segment, []
        segment.changed(self._name)
        flat = np.ascontiguousarray(data, segment.dtype_of(self._name))
        for key, first, low, high, channel in segment.split(self._name, start, flat.size):
            part = flat[low:high]
            if channel is not None:
                part = segment.stripes_of(self._name).gather(flat, start, channel)
            written.append(segment.store.submit_write(key, part, first * part.itemsize))
            segment.count_write(self._name, part.nbytes)
        return written


class DriveSegment(Segment):
    """Arrays of parameters that are kept on drives.

    Parameters
    ----------
    counts : number of elements of each parameter.
    keys : names of the parameters on the drives.

    Attributes
    ----------
    spans : first element and number of elements of each parameter.
    on_drives : arrays that have tensors on the drives.
    partial : those of them that some parameters lack, which had no part in another run's units.
    parameters : parameters whose extents are in this segment.
    dirty : arrays written outside of steps, in memory or on drives, since the last commit.
    unit : index among the segments of an optimizer.
    in_step : a step runs: `reserve` leaves gradients, which do not outlast it, in memory.
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
        quantized: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._keys = keys
        self.unit = unit
        self.spans: list[tuple[int, int]] = []
        size = 0
        for count in counts:
            self.spans.append((size, count))
            size += padded(count, line)
        super().__init__(device, size, line, MappingProxyType(dict(dtypes)), quantized)
        self._drives = drives
        self._traffic = traffic
        self.parameters: list[DeviceParameter] = []
        self.dirty: set[str] = set()
        self.in_step = False
        self.on_drives: set[str] = set()
        self.partial: set[str] = set()
        self._nbytes: dict[str, int] = {}
        self.find()

    @property
    def store(self) -> Store:
        """The open store. Raises `StorageError`."""
        return self._drives.store

    @abstractmethod
    def tensors(self, array: str) -> Iterator[tuple[str, int, int | None]]:
        """Yield the tensors of an array: name, number of elements (of one in 8 bits, bytes), and
        the drive that has the whole tensor, or None if the tensor is striped."""

    @abstractmethod
    def split(self, array: str, start: int, count: int) -> Iterator[Part]:
        """Yield the parts of tensors that have elements [start, start + count) of an array; of one
        in 8 bits, bytes."""

    def extent_bytes(self, array: str) -> int | None:
        """Return the most bytes of an extent of a new array; None: those of the store."""
        return None

    @abstractmethod
    def find(self) -> None:
        """Set `on_drives` and `partial` to the arrays that the drives have."""

    def elsewhere(self, array: str) -> StoredArray | None:
        on_drives = array in self.on_drives and not self.has(array)
        return StoredArray(self, array) if on_drives else None

    def has(self, array: str) -> bool:
        """Return whether an array is in memory."""
        return array in self._arenas[0]

    def written(self, array: str) -> None:
        if array not in GRADIENTS or array in self.on_drives:
            self.changed(array)

    def changed(self, array: str) -> None:
        """Mark an array as different from the last generation on the drives."""
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
        """Add missing arrays, except `besides`, to the drives, and fill them; in a step gradients
        are in memory already."""
        for name, value in arrays.items():
            passes = self.in_step and name in GRADIENTS
            if not (self.has_whole(name) or name == besides or passes):
                self._add(name, value)

    def has_whole(self, array: str) -> bool:
        """Return whether the drives have an array of all parameters."""
        return array in self.on_drives and array not in self.partial

    def _add(self, name: str, value: float) -> None:
        dtype, there = self.dtype_of(name), self.store.tensors
        missing = [each for each in self.tensors(name) if each[0] not in there]
        for key, count, drive in missing:
            extent = self.extent_bytes(name)
            self.store.add(key, count * dtype.itemsize, drive=drive, extent_bytes=extent)
        self.on_drives.add(name)
        self.partial.discard(name)
        self.changed(name)
        if (value == 0.0 and not self.is_quantized(name)) or self.has(name):
            return  # new tensors have zeros
        data = self.filling(name, value)
        for key, count, _ in missing:
            for at in range(0, count, data.size):
                part = data[: count - at]
                self.store.write(key, part, at * dtype.itemsize)
                self._traffic.to_drives += part.nbytes

    def remove(self, name: str) -> None:
        """Remove an array from the drives."""
        self.on_drives.discard(name)
        self.partial.discard(name)
        self.dirty.discard(name)
        there = self.store.tensors
        for key in (key for key, _, _ in self.tensors(name) if key in there):
            self.store.remove(key)


class StripedSegment(DriveSegment):
    """A segment with one tensor for each parameter and array, striped over the host's drives.

    `allocate` allocates memory for whole arrays.
    """

    @property
    def has_padding(self) -> bool:
        """Whether there are padding elements behind parameters."""
        return self._size > sum(count for _, count in self.spans)

    def tensors(self, array: str) -> Iterator[tuple[str, int, int | None]]:
        for key, first, last in self._places(array):
            yield f"{key}.{array}", last - first, None

    def split(self, array: str, start: int, count: int) -> Iterator[Part]:
        for key, first, last in self._places(array):
            low, high = max(first, start), min(last, start + count)
            if low < high:
                yield Part(f"{key}.{array}", low - first, low - start, high - start, None)

    def _places(self, array: str) -> Iterator[tuple[str, int, int]]:
        """Yield the name of each parameter, and its elements of an array; of one in 8 bits,
        bytes."""
        for key, (start, count) in zip(self._keys, self.spans, strict=True):
            yield key, *self.span(array, start, start + count)[1:]

    def find(self) -> None:
        keys, there = set(self._keys), self.store.tensors
        named = (name.rpartition(".") for name in there)
        self.on_drives = {array for key, _, array in named if key in keys}
        self.partial = {
            array
            for array in self.on_drives
            if any(f"{key}.{array}" not in there for key in self._keys)
        }

    def nbytes(self, array: str) -> int:
        """Return the bytes of an array on the channel with the largest share."""
        if array not in self._nbytes:
            stripes, _, size = self.span(array, 0, self._size)
            most = max(stripes.before(size, channel) for channel in range(stripes.channels))
            self._nbytes[array] = padded(most * self.dtype_of(array).itemsize, LINE_BYTES)
        return self._nbytes[array]

    def copied_bytes(self, array: str) -> int:
        """Return the bytes of an array of parameters that are copied to memory, not lent."""
        small = sum(padded(count, self.line) for _, count in self.spans if count < SMALL_ELEMENTS)
        return padded(small * self.dtype_of(array).itemsize, LINE_BYTES)

    def allocate(self, loaded: Sequence[str], made: Sequence[str]) -> None:
        """Allocate memory for arrays.

        Parameters
        ----------
        loaded : arrays that are then loaded whole.
        made : other arrays, whose padding is set to zeros if runs update padding.
        """
        runs_on = self.has_padding and not self._device.ends_runs
        values = dict.fromkeys(made, 0.0 if runs_on else None)
        self._allocate({**dict.fromkeys(loaded, None), **values})

    def view(self, array: str) -> NDArray[Any]:
        """Return an array in memory of this process, without a copy."""
        held = self._arenas[0][array]
        return self._device.backend.host_view(held.address, held.nbytes).view(held.dtype)

    def put(self, array: str, flat: NDArray[Any]) -> None:
        """Write a whole array that was loaded to its memory; or make `flat` its memory."""
        held = self._arenas[0][array]
        if not self._device.backend.replace_memory(held.address, flat.view(np.uint8)):
            dirty = set(self.dirty)
            self.whole.write(array, flat)
            self.dirty = dirty

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
        """Whether the device has bits of a master that the host lacks."""
        return not all(parameter.is_on_host for parameter in self.parameters)


class ShardedSegment(DriveSegment):
    """A segment sharded over cards by block (section IV-D).

    The store has a drive for each card. Every drive has a tensor with the card's share of each
    array. Cards keep no arrays in memory: subgroups are loaded, updated and stored.
    """

    def key(self, array: str, channel: int) -> str:
        """Return the name of a card's share of an array."""
        return f"{self.unit}.{array}@{channel}"

    def tensors(self, array: str) -> Iterator[tuple[str, int, int | None]]:
        stripes, _, size = self.span(array, 0, self._size)
        for channel in range(stripes.channels):
            yield self.key(array, channel), stripes.before(size, channel), channel

    def split(self, array: str, start: int, count: int) -> Iterator[Part]:
        stripes = self.stripes_of(array)
        for channel in range(stripes.channels):
            first, last = stripes.span(start, start + count, channel)
            if first < last:
                yield Part(self.key(array, channel), first, 0, last - first, channel)

    def extent_bytes(self, array: str) -> int:
        assert isinstance(self._device, SmartssdDevice), "the device is of cards"
        _, _, size = self.span(array, 0, self._device.card.subgroup)
        most = self.store.drives[0].header.extent_bytes
        return extents_of(size * self.dtype_of(array).itemsize, most)

    def find(self) -> None:
        self.on_drives = {
            name.partition(".")[2].removesuffix("@0")
            for name in self.store.tensors
            if name.partition(".")[0] == str(self.unit) and name.endswith("@0")
        }

    def reserve(self, arrays: Mapping[str, float], *, besides: str = "") -> None:
        kept = {name: value for name, value in arrays.items() if not name.startswith(COPY)}
        super().reserve(kept, besides=besides)
