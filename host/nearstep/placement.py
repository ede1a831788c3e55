"""Where parameters lie on a device, and how they are grouped into runs of the kernel."""

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
"""Arrays of an Adam step, each with what its elements are before the first: parameters, gradients,
first and second moments."""

_DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "g_fp16": np.dtype(np.float16),
        "g_bf16": np.dtype(np.uint16),
        "copy_fp16": np.dtype(np.float16),
        "copy_bf16": np.dtype(np.uint16),
    }
)
"""Arrays of 16 bits of any segment: gradients, and copies of the updated parameters."""

FILLED_BYTES = 1 << 20
"""Bytes of an array in 8 bits that are written at once where it is filled."""

LINE_ELEMENTS = LINE_BYTES // np.dtype(np.float32).itemsize
"""Elements of a line of an fp32 array. A line of a 16-bit array has twice as many."""


Arenas = Mapping[str, Buffer]
"""The arrays of a segment on one channel, by name."""


class Elsewhere(Protocol):
    """An array of a segment that is not in the memory of the device: its elements, or the bytes of
    one in 8 bits."""

    def read(self, start: int, out: NDArray[Any]) -> None:
        """Copy what is from `start` on to `out`, of shape (n,)."""

    def write(self, start: int, data: NDArray[Any]) -> None:
        """Copy `data`, of shape (n,), to what is from `start` on."""


class Segment:
    """Arrays of parameters that were placed together, striped over the channels by block.

    Parameters
    ----------
    size : elements of each array.
    line : extents start on multiples of it; in a segment with arrays of 16 bits, two lines; with
        arrays in 8 bits, a block.
    dtypes : of arrays of the rule that are not float32.
    quantized : formats of those in 8 bits, by name. What is read and written of one are the bytes
        that it has on a device of one channel.

    Attributes
    ----------
    stripes : how elements are spread over the channels.
    arenas : by channel.
    origin : index of its first element among those of all segments of a placement.
    numbers : index of the first element of each extent among the parameters of a placement, each
        from a multiple of two lines on.
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
        """Of the elements of an array."""
        return self._dtypes.get(array, np.dtype(np.float32))

    def span(self, array: str, start: int, stop: int) -> tuple[Stripes, int, int]:
        """Elements [start, stop) of an array as what its buffers have, elements or bytes: how these
        are spread over the channels, and which they are.

        In an array in 8 bits `start` begins a block.
        """
        layout = self._layout
        if layout is None or array not in self._quantized:
            return self.stripes, start, stop
        block = Stripes(layout.nbytes(layout.elements), self.stripes.channels)
        first = layout.offset(start)
        return block, first, first + layout.nbytes(stop - start)

    def is_quantized(self, array: str) -> bool:
        """Whether an array is in 8 bits."""
        return array in self._quantized

    def runs_on(self, count: int) -> bool:
        """Whether a run may go on behind an extent of `count` elements: if no padding has a scale
        together with any of them, and the device does not end a run with each tensor."""
        if self._device.ends_runs:
            return count % self.line == 0
        return not (self._quantized and count % GROUP)

    @property
    def compares(self) -> bool:
        """Whether the device can tell if an array is equal to one of the host's."""
        return self._device.backend.compares_memory

    @property
    def take_largest(self) -> TakeLargest | None:
        """What the device's backend offers to take elements from arrays of the host by."""
        return self._device.backend.take_largest

    @property
    def arenas(self) -> Sequence[Arenas]:
        return self._arenas

    def elsewhere(self, array: str) -> Elsewhere | None:
        """Where an array is while it is not in the memory of the device."""
        return None

    def written(self, array: str) -> None:
        """The host has written some of an array in the memory of the device."""

    def reserve(self, arrays: Mapping[str, float], *, besides: str = "") -> None:
        """Allocate those of `arrays` that are missing, `besides` one, each filled with its value.

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
        """Return a part of an array whose elements have a value; repeated, it is all of it."""
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
        """Free what there is of these arrays."""
        names = list(arrays)
        for arenas in self._arenas:
            _free([arenas.pop(name) for name in names if name in arenas])

    def reserve_lists(
        self, sizes: Sequence[int], dtypes: Mapping[str, DTypeLike]
    ) -> Sequence[Arenas]:
        """Allocate arrays that are not striped: for each channel one of each dtype, of a size of
        its own.

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
        """Where elements [start, stop) of an array are: channel and buffer, without empty ones."""
        stripes, begin, end = self.span(array, start, stop)
        for channel, arenas in enumerate(self.arenas):
            first, last = stripes.span(begin, end, channel)
            if first < last:
                yield channel, arenas[array][first:last]

    def numbering(self, start: int, channel: int) -> Numbering:
        """Indices of the elements that a channel has from element `start` on: the same, however
        many channels there are."""
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
        """Give the memory back, unless that has been done."""
        for arenas in self._arenas:
            _free(arenas.values())
        _free(self._lists)

    def free_besides(self, array: str) -> None:
        """Give the memory of all arrays but one back; `reserve` allocates them anew."""
        for arenas in self._arenas:
            _free(arenas.pop(name) for name in list(arenas) if name != array)
        _free(self._lists)
        self._lists.clear()


@dataclass(frozen=True, eq=False)
class Extent:
    """Place of one parameter: the same range of each array of a segment.

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
        """First element of a neighbour: behind the last line that this one has elements in."""
        return self.start + padded(self.count, self.segment.line)

    def size(self, array: str) -> int:
        """Of what is read and written of `array`: elements; of one in 8 bits, bytes."""
        _, first, last = self.segment.span(array, self.start, self.start + self.count)
        return last - first

    def views(self, array: str) -> Sequence[Buffer]:
        """The parts of `array` that hold this parameter, by channel, without empty ones."""
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
        """`write` without a copy, if it can be had: see `nearstep.buffer.Buffer.lend`.

        Arrays that are striped over channels, or not in memory, are never lent.
        """
        whole = self.segment.arenas[0].get(array)
        if self.segment.stripes.channels > 1 or whole is None:
            return False
        return whole[self.start : self.start + self.count].lend(data, writes=writes)

    def end_loan(self, array: str) -> None:
        """What was lent as this array is the owner's again.

        On a closed device, or if the memory was freed, it is so already.
        """
        buffer = self.segment.arenas[0].get(array)
        if buffer is not None and not buffer.freed and not buffer.device.closed:
            buffer.end_loan(self.start)

    def holds(self, array: str, data: NDArray[Any]) -> bool | None:
        """Whether one array is equal to `data`, of shape (count,), bit for bit; None if it takes
        a `read` to find out."""
        if self.segment.elsewhere(array) is not None:
            return None
        for channel, view in self.segment.parts(array, self.start, self.start + self.count):
            same = view.holds(self.segment.stripes.gather(data, self.start, channel))
            if not same:
                return same
        return True

    def read(self, array: str, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """One array, of shape (size(array),), from the device; into `out` if given.

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
        """Whether a run that updates `other` may go on with this one."""
        segment = other.segment
        return self.segment is segment and other.end == self.start and segment.runs_on(other.count)

    def __repr__(self) -> str:
        return f"<extent of {self.count} elements at {self.start}>"


@dataclass(frozen=True, eq=False)
class Launch:
    """Neighbouring extents that one run of the kernel of each channel updates.

    Attributes
    ----------
    key : what they have in common.
    count : elements over all channels, padding between extents included: it is updated with them,
        and nobody reads it.
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
        """First element in its segment."""
        return self.extents[0].start

    @property
    def stop(self) -> int:
        """Element of its segment behind the last."""
        return self.start + self.count

    @property
    def channels(self) -> Sequence[int]:
        """Those that have any of its elements."""
        stripes = self.segment.stripes
        spans = (stripes.span(self.start, self.stop, each) for each in range(stripes.channels))
        return [channel for channel, (first, last) in enumerate(spans) if first < last]

    def cut(self, start: int, stop: int) -> Mapping[int, Arenas]:
        """`parts` of elements [start, stop) of the segment alone."""
        return _parts(self.segment, start, stop)


class Placement:
    """Maps parameters to extents in arrays on one device.

    Parameters that are placed together are neighbours in the order given, so that a step needs one
    run a channel for each stretch of them that has equal hyper-parameters and step count, not one
    for each.
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
        """Make a segment of `arrays`, filled with their values, with an extent for each count
        that starts on a multiple of `line` elements; `dtypes` and `quantized` as of `Segment`.

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
        """The same in a segment that was made for them.

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
        """Have a segment, which has so many elements in extents, for runs; its memory is another's
        to give back."""
        self._number(segment, elements)
        self._guests.append(segment)

    def _number(self, segment: Segment, elements: int) -> None:
        """Have a segment behind all others."""
        segment.origin = self._elements
        self._elements += elements
        self._segments.append(segment)

    def launches(self, keyed: Iterable[tuple[Extent, Hashable]]) -> Iterator[Launch]:
        """Group extents into runs: neighbours of one segment, in order, with equal keys.

        Where arrays are in 8 bits, a run ends behind an extent whose last group is not whole: the
        scale of that group is of its elements alone.

        Parameters
        ----------
        keyed : extents to update, in any order, each with what must be equal within a run.
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
        """Give all memory back, but for parameters in segments that were adopted.

        On a closed device, or a second time, there is nothing to do.
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
    """What an array of a dtype has for a value: of uint16, which holds bfloat16, the bits of the
    nearest one, ties to even."""
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
