"""Places of parameters in device memory, and their grouping into runs of the kernel."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import DTypeLike, NDArray

from nearstep import blockwise
from nearstep.allocator import LINE_BYTES
from nearstep.backends.base import TakeLargest
from nearstep.buffer import Buffer
from nearstep.device import Device
from nearstep.errors import ArgumentError, ShapeError
from nearstep.stripes import Stripes
from nearstep.updater.rounding import Numbering
from nearstep_spec.blockwise import GROUP, SIGNED

ARRAYS: Mapping[str, float] = MappingProxyType({"p": 0.0, "g": 0.0, "m": 0.0, "v": 0.0})
"""Arrays of an Adam step, with initial values: parameters, gradients, first and second moments."""

_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "g_fp16": np.dtype(np.float16),
        "g_bf16": np.dtype(np.uint16),
        "copy_fp16": np.dtype(np.float16),
        "copy_bf16": np.dtype(np.uint16),
    }
)
"""16-bit arrays of any segment: gradients, and copies of the updated parameters."""

FILLED_BYTES = 1 << 20
"""Bytes written at a time when an array is filled."""

LINE_ELEMENTS = LINE_BYTES // np.dtype(np.float32).itemsize
"""Elements of a line of an fp32 array. A line of a 16-bit array has twice as many."""


Arenas = Mapping[str, Buffer]
"""The arrays of a segment on one channel, by name."""


class Elsewhere(Protocol):
    """An array of a segment that is not in device memory, counted in elements, or, if it is in
    8 bits, in bytes."""

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Copy elements from `start` on to `out`, of shape (n,)."""

    def write(self, start: int, data: NDArray[Any]) -> None:
        """Copy `data`, of shape (n,), to elements from `start` on."""


class Segment:
    """Arrays of parameters that were placed together, striped over the channels by block.

    Parameters
    ----------
    size : elements of each array.
    line : alignment of extents, in elements: a line; two lines if the segment has 16-bit arrays; a
        block if it has arrays in 8 bits.
    dtypes : of arrays of the rule that are not float32.
    quantized : formats of arrays in 8 bits, by name. Such an array is read and written as bytes, in
        the layout of a device with one channel.

    Attributes
    ----------
    stripes : how elements are spread over the channels.
    arenas : arrays in device memory, by channel and name.
    origin : index of the first element among those of all segments of a placement.
    numbers : by the start of each extent, index of its first element among the parameters of a
        placement; each parameter begins at a multiple of two lines.
    """

    def __init__(
        self,
        device: Device,
        size: int,
        line: int = LINE_ELEMENTS,
        dtypes: Mapping[str, np.dtype] = MappingProxyType({}),
        quantized: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        element = np.dtype(np.float32).itemsize
        self.stripes = Stripes(device.stripe_bytes // element, device.channel_count)
        self._arenas: tuple[dict[str, Buffer], ...] = tuple(
            {} for _ in range(self.stripes.channels)
        )
        self._lists: list[Buffer] = []
        self._device = device
        self._size = size
        self.line = line
        self.origin = 0
        self.numbers: dict[int, int] = {}
        self._dtypes = {**_DTYPES, **dtypes, **dict.fromkeys(quantized, np.dtype(np.uint8))}
        self._quantized = dict(quantized)
        self._layout = device.block_layout if quantized else None
        if self._layout is not None:
            assert line % self._layout.elements == 0, "extents are whole blocks"
            assert self.stripes.channels == 1 or self.stripes.block == self._layout.elements

    def dtype_of(self, array: str) -> np.dtype:
        """Dtype of an array's buffers: uint8 if the array is in 8 bits."""
        return self._dtypes.get(array, np.dtype(np.float32))

    def span(self, array: str, start: int, stop: int) -> tuple[Stripes, int, int]:
        """Convert elements [start, stop) of an array to a range of what its buffers hold: elements,
        or the bytes of an array in 8 bits, in which `start` begins a block.

        Returns
        -------
        stripes, first, last : how the buffers are striped, and the range.
        """
        layout = self._layout
        if layout is None or array not in self._quantized:
            return self.stripes, start, stop
        first = layout.offset(start)
        return self.stripes_of(array), first, first + layout.nbytes(stop - start)

    def stripes_of(self, array: str) -> Stripes:
        """How what the buffers of an array hold is striped: elements, or bytes as in `span`."""
        if self._layout is None or array not in self._quantized:
            return self.stripes
        return self.stripes.in_bytes(self._layout)

    def is_quantized(self, array: str) -> bool:
        """Whether an array is in 8 bits."""
        return array in self._quantized

    def runs_on(self, count: int) -> bool:
        """Whether a run may continue after an extent of `count` elements: not if padding follows,
        and the device ends runs there, or the padding shares the scale of a group with elements."""
        if self._device.ends_runs:
            return count % self.line == 0
        return not (self._quantized and count % GROUP)

    @property
    def compares(self) -> bool:
        """Whether the device can tell if an array is equal to one of the host's."""
        return self._device.backend.compares_memory

    @property
    def take_largest(self) -> TakeLargest | None:
        """`Backend.take_largest` of the device."""
        return self._device.backend.take_largest

    @property
    def arenas(self) -> Sequence[Arenas]:
        return self._arenas

    def host_array(self, array: str) -> NDArray[Any] | None:
        """The whole array where the device has it, if that is memory of this process; else None."""
        backend, held = self._device.backend, self._arenas[0].get(array)
        if held is None or not backend.is_host_memory or self.elsewhere(array) is not None:
            return None
        return backend.host_view(held.address, held.nbytes).view(held.dtype)

    def elsewhere(self, array: str) -> Elsewhere | None:
        """The array's store while the array is not in device memory; None while it is."""
        return None

    def written(self, array: str) -> None:
        """Note that the host writes an array in device memory."""

    def reserve(self, arrays: Mapping[str, float], *, besides: str = "") -> None:
        """Allocate those of `arrays` that are missing, except `besides`, and fill each with its
        value.

        Raises
        ------
        OutOfDeviceMemoryError : none of them stays allocated.
        """
        held = self._arenas[0]
        if held.keys() >= arrays.keys():
            return
        missing = [name for name in arrays if name not in held and name != besides]
        if not missing:
            return
        self._allocate({name: arrays[name] for name in missing})

    def _allocate(self, arrays: Mapping[str, float | None]) -> None:
        """Allocate arrays, each filled with its value unless that is None."""
        missing = list(arrays)
        device, quantized = self._device, list(self._quantized)
        skews = {name: (1 + k) * device.stripe_skew for k, name in enumerate(quantized)}
        try:
            for channel, arenas in enumerate(self._arenas):
                for name, value in arrays.items():
                    stripes, _, size = self.span(name, 0, self._size)
                    arenas[name] = device.alloc(
                        stripes.before(size, channel),
                        self.dtype_of(name),
                        channel=channel,
                        align=device.stripe_align,
                        offset=skews.get(name, 0) % device.stripe_align,
                    )
                    if value is not None and name in self._quantized:
                        self._fill_blocks(arenas[name], self.filling(name, value))
                    elif value is not None:
                        arenas[name].fill(element(value, arenas[name].dtype))
        except BaseException:
            self._give_up(missing)
            raise

    def filling(self, array: str, value: float) -> NDArray[Any]:
        """Return a piece of an array whose elements all have a value; to be repeated."""
        if array not in self._quantized:
            dtype = self.dtype_of(array)
            return np.full(FILLED_BYTES // dtype.itemsize, element(value, dtype), dtype)
        assert self._layout is not None, "there are arrays in 8 bits"
        values = np.full(self._layout.elements, value, np.float32)
        codes = blockwise.quantize(values, signed=SIGNED[self._quantized[array]])
        block = blockwise.pack(codes, self._layout)
        return np.tile(block, max(1, FILLED_BYTES // block.size))

    def _fill_blocks(self, buffer: Buffer, blocks: NDArray[np.uint8]) -> None:
        for at in range(0, buffer.size, blocks.size):
            stop = min(at + blocks.size, buffer.size)
            buffer[at:stop].write(blocks[: stop - at])

    def _give_up(self, arrays: Iterable[str]) -> None:
        """Free these arrays, as far as they are allocated."""
        names = list(arrays)
        for arenas in self._arenas:
            _free([arenas.pop(name) for name in names if name in arenas])

    def reserve_lists(
        self, sizes: Sequence[int], dtypes: Mapping[str, DTypeLike]
    ) -> Sequence[Arenas]:
        """Allocate arrays that are not striped: on each channel one of each dtype, with the
        channel's size.

        Raises
        ------
        OutOfDeviceMemoryError : none of them stays allocated.
        """
        made: list[dict[str, Buffer]] = [{} for _ in sizes]
        try:
            for channel, size in enumerate(sizes):
                for name, dtype in dtypes.items():
                    made[channel][name] = self._device.alloc(size, dtype, channel=channel)
        except BaseException:
            _free(buffer for buffers in made for buffer in buffers.values())
            raise
        self._lists += [buffer for buffers in made for buffer in buffers.values()]
        return made

    def parts(self, array: str, start: int, stop: int) -> Iterator[tuple[int, Buffer]]:
        """Channels and buffers of elements [start, stop) of an array, without empty ones."""
        stripes, begin, end = self.span(array, start, stop)
        for channel, arenas in enumerate(self.arenas):
            first, last = stripes.span(begin, end, channel)
            if first < last:
                yield channel, arenas[array][first:last]

    def numbering(self, start: int, channel: int) -> Numbering:
        """Indices of a channel's elements from element `start` on, for random bits; they do not
        depend on the number of channels."""
        stripes = self.stripes
        if self._device.ends_runs:
            return Numbering(index=self.numbers[start])
        place = stripes.before(start, channel)
        return Numbering(
            index=self.origin + stripes.element(place, channel),
            within=place % stripes.block,
            skip=(stripes.channels - 1) * stripes.block,
        )

    def free(self) -> None:
        """Free the memory, unless that has been done."""
        for arenas in self._arenas:
            _free(arenas.values())
        _free(self._lists)

    def free_besides(self, array: str) -> None:
        """Free all arrays but one; `reserve` allocates them anew."""
        for arenas in self._arenas:
            _free(arenas.pop(name) for name in list(arenas) if name != array)
        _free(self._lists)
        self._lists.clear()


@dataclass(frozen=True, eq=False)
class Extent:
    """One parameter in device memory: the same range of each array of a segment.

    Attributes
    ----------
    start : first element; a multiple of the segment's `line`.
    count : elements.
    """

    segment: Segment
    start: int
    count: int

    @cached_property
    def end(self) -> int:
        """First element behind the extent, padded to the segment's `line`."""
        return self.start + padded(self.count, self.segment.line)

    def size(self, array: str) -> int:
        """Elements that `read` and `write` copy; bytes if `array` is in 8 bits."""
        _, first, last = self.segment.span(array, self.start, self.start + self.count)
        return last - first

    def views(self, array: str) -> Sequence[Buffer]:
        """This parameter's parts of `array`, by channel, without empty ones."""
        stop = self.start + self.count
        return [view for _, view in self.segment.parts(array, self.start, stop)]

    def write(self, array: str, data: NDArray[Any]) -> None:
        """Copy `data`, `size(array)` elements in any shape, to one array on the device.

        Raises
        ------
        ShapeError, DtypeError, ModeError, FreedBufferError, ClosedDeviceError
        """
        flat = data.reshape(-1)
        stop = self.start + self.count
        stripes, first, last = self.segment.span(array, self.start, stop)
        if flat.size != last - first:
            raise ShapeError(f"{array} of {self!r}", (last - first,), data.shape)
        elsewhere = self.segment.elsewhere(array)
        if elsewhere is not None:
            elsewhere.write(first, flat)
            return
        self.segment.written(array)
        for channel, view in self.segment.parts(array, self.start, stop):
            view.write(stripes.gather(flat, first, channel))

    def lend(self, array: str, data: NDArray[Any], *, writes: bool = False) -> bool:
        """`write` without a copy, if possible: see `nearstep.buffer.Buffer.lend`.

        Arrays that are striped over channels, or not in device memory, are never lent.
        """
        whole = self.segment.arenas[0].get(array)
        if self.segment.stripes.channels > 1 or whole is None:
            return False
        return whole[self.start : self.start + self.count].lend(data, writes=writes)

    def end_loan(self, array: str) -> None:
        """End a loan, unless the device was closed or the memory freed."""
        buffer = self.segment.arenas[0].get(array)
        if buffer is not None and not buffer.freed and not buffer.device.closed:
            buffer.end_loan(self.start)

    def holds(self, array: str, data: NDArray[Any]) -> bool | None:
        """Whether one array is equal to `data`, of shape (count,), bit for bit; None if only a
        `read` can tell."""
        if self.segment.elsewhere(array) is not None:
            return None
        for channel, view in self.segment.parts(array, self.start, self.start + self.count):
            same = view.holds(self.segment.stripes.gather(data, self.start, channel))
            if not same:
                return same
        return True

    def read(self, array: str, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Copy one array to `out`, or to a new array, of shape (size(array),), and return it.

        Raises
        ------
        ShapeError, DtypeError, ModeError, FreedBufferError, ClosedDeviceError
        """
        stop = self.start + self.count
        stripes, first, last = self.segment.span(array, self.start, stop)
        if out is None:
            out = np.empty(last - first, self.segment.dtype_of(array))
        elif out.shape != (last - first,):
            raise ShapeError(f"{array} of {self!r}", (last - first,), out.shape)
        elsewhere = self.segment.elsewhere(array)
        if elsewhere is not None:
            elsewhere.read(first, out)
            return out
        for channel, view in self.segment.parts(array, self.start, stop):
            if stripes.channels == 1:
                view.read(out)
            else:
                stripes.scatter(view.read(), out, first, channel)
        return out

    def joins(self, other: Extent) -> bool:
        """Whether a run that updates `other` may continue with this extent."""
        segment = other.segment
        return self.segment is segment and other.end == self.start and segment.runs_on(other.count)

    def __repr__(self) -> str:
        return f"<extent of {self.count} elements at {self.start}>"


@dataclass(frozen=True, eq=False)
class Launch:
    """Neighbouring extents that one run of the kernel of each channel updates.

    Attributes
    ----------
    key : the extents' common key.
    count : elements over all channels, including padding between extents, which is updated and
        never read.
    parts : buffers of each run, by channel and array.
    """

    key: Hashable
    count: int
    parts: Mapping[int, Arenas]
    extents: Sequence[Extent]

    @property
    def segment(self) -> Segment:
        return self.extents[0].segment

    @property
    def start(self) -> int:
        """First element, in the segment."""
        return self.extents[0].start

    @property
    def stop(self) -> int:
        """End, in the segment."""
        return self.start + self.count

    @property
    def channels(self) -> Sequence[int]:
        """Channels that have elements of the launch."""
        stripes = self.segment.stripes
        spans = (stripes.span(self.start, self.stop, each) for each in range(stripes.channels))
        return [channel for channel, (first, last) in enumerate(spans) if first < last]

    def cut(self, start: int, stop: int) -> Mapping[int, Arenas]:
        """`parts` of elements [start, stop) of the segment alone."""
        return _parts(self.segment, start, stop)


class Placement:
    """Maps parameters to extents in arrays on one device.

    Parameters that are placed together are neighbours, in the order given: a step needs one run a
    channel for each stretch of parameters with equal hyper-parameters and step count.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._segments: list[Segment] = []
        self._guests: list[Segment] = []
        self._elements = self._numbered = 0  # of all segments so far

    def place(
        self,
        counts: Sequence[int],
        arrays: Mapping[str, float] = ARRAYS,
        *,
        line: int = LINE_ELEMENTS,
        dtypes: Mapping[str, np.dtype] = MappingProxyType({}),
        quantized: Mapping[str, str] = MappingProxyType({}),
    ) -> list[Extent]:
        """Make a segment of `arrays`, filled with their values, with an extent for each count;
        `line`, `dtypes` and `quantized` are as in `Segment`.

        Raises
        ------
        ArgumentError : a count is negative.
        OutOfDeviceMemoryError : nothing stays allocated.
        """
        if any(count < 0 for count in counts):
            raise ArgumentError(f"counts must not be negative, not {list(counts)}")
        size = sum(padded(count, line) for count in counts)
        segment = Segment(self.device, size, line, dtypes, quantized)
        return self.place_in(segment, counts, arrays)

    def place_in(
        self, segment: Segment, counts: Sequence[int], arrays: Mapping[str, float]
    ) -> list[Extent]:
        """Make extents in a segment of their size.

        Raises
        ------
        OutOfDeviceMemoryError : nothing stays allocated.
        """
        segment.reserve(arrays)
        self._number(segment, sum(padded(count, segment.line) for count in counts))
        extents = []
        start = 0
        for count in counts:
            extents.append(Extent(segment, start, count))
            segment.numbers[start] = self._numbered
            self._numbered += padded(count, 2 * LINE_ELEMENTS)
            start = extents[-1].end
        return extents

    def adopt(self, segment: Segment, elements: int) -> None:
        """Add a segment with so many `elements` in extents; the owner frees its parameters, `free`
        the other arrays."""
        self._number(segment, elements)
        self._guests.append(segment)

    def _number(self, segment: Segment, elements: int) -> None:
        """Append a segment, and number its elements."""
        segment.origin = self._elements
        self._elements += elements
        self._segments.append(segment)

    def launches(self, keyed: Iterable[tuple[Extent, Hashable]]) -> Iterator[Launch]:
        """Group extents into runs: neighbours of one segment, in order, with equal keys.

        With arrays in 8 bits, a run ends after an extent whose last group is not whole, so that
        padding does not change the scale of that group.

        Parameters
        ----------
        keyed : extents to update, in any order, each with its key.
        """
        order = {id(segment): index for index, segment in enumerate(self._segments)}
        pending = sorted(
            ((extent, key) for extent, key in keyed if extent.count),
            key=lambda item: (order[id(item[0].segment)], item[0].start),
        )
        group: list[Extent] = []
        group_key: Hashable = None
        for extent, key in pending:
            joins = group and group_key == key and extent.joins(group[-1])
            if group and not joins:
                yield _launch(group_key, group)
                group = []
            group.append(extent)
            group_key = key
        if group:
            yield _launch(group_key, group)

    def free(self) -> None:
        """Free all memory, except parameters in segments that were adopted.

        On a closed device, or a second time, do nothing.
        """
        for segment in self._segments:
            if segment in self._guests:
                segment.free_besides("p")
            else:
                segment.free()
        self._segments.clear()
        self._guests.clear()


def _free(buffers: Iterable[Buffer]) -> None:
    for buffer in buffers:
        if not buffer.freed and not buffer.device.closed:
            buffer.free()


def padded(count: int, line: int) -> int:
    """The next multiple of `line`."""
    return -(-count // line) * line


def _launch(key: Hashable, extents: Sequence[Extent]) -> Launch:
    start, stop = extents[0].start, extents[-1].start + extents[-1].count
    return Launch(key, stop - start, _parts(extents[0].segment, start, stop), tuple(extents))


def element(value: float, dtype: np.dtype) -> float:
    """A value as an element of a dtype: for uint16, the bits of the nearest bfloat16, ties to even;
    for others the value."""
    if dtype != np.uint16:
        return value
    bits = int(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


def _parts(segment: Segment, start: int, stop: int) -> Mapping[int, Arenas]:
    """Elements [start, stop) of every array of a segment, by channel."""
    parts: dict[int, dict[str, Buffer]] = {}
    for name in segment.arenas[0]:
        for channel, view in segment.parts(name, start, stop):
            parts.setdefault(channel, {})[name] = view
    return parts
