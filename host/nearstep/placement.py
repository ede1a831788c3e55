"""Where parameters lie on a device, and how they are grouped into runs of the kernel."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nearstep.allocator import LINE_BYTES
from nearstep.buffer import Buffer
from nearstep.errors import ArgumentError

if TYPE_CHECKING:
    from nearstep.device import Device

ARRAYS = ("p", "g", "m", "v")
"""Arrays of an Adam step: parameters, gradients, first and second moments."""

_LINE_ELEMENTS = LINE_BYTES // np.dtype(np.float32).itemsize


@dataclass(frozen=True, eq=False)
class Extent:
    """Place of one parameter: the same range of each of the arenas of a segment.

    Attributes
    ----------
    arenas: Mapping[str, Buffer]
        The segment's arenas, by array.
    start: int
        First element; a multiple of 16, so that it starts on a 64-byte line.
    count: int
        Elements.
    """

    arenas: Mapping[str, Buffer]
    start: int
    count: int

    @property
    def end(self) -> int:
        """First element of a neighbour: behind the last line that this one has elements in."""
        return self.start + _padded(self.count)

    def view(self, array: str) -> Buffer:
        """The part of arena ``array`` that holds this parameter."""
        return self.arenas[array][self.start : self.start + self.count]

    def write(self, array: str, data: NDArray[Any]) -> None:
        """Copy ``data``, fp32 of ``count`` elements in any shape, to one array on the device.

        Raises
        ------
        ShapeError, DtypeError, FreedBufferError, ClosedDeviceError
        """
        self.view(array).write(data.reshape(-1))

    def read(self, array: str, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """One array, of shape (count,), from the device; into ``out`` if given.

        Raises
        ------
        ShapeError, DtypeError, FreedBufferError, ClosedDeviceError
        """
        return self.view(array).read(out)


@dataclass(frozen=True)
class Launch:
    """Neighbouring extents that one run of the kernel updates.

    Attributes
    ----------
    key: Hashable
        What they have in common.
    buffers: Mapping[str, Buffer]
        By array, from the first element of the first extent to the last of the last; the padding
        between extents is updated with them, and nobody reads it.
    extents: Sequence[Extent]
    """

    key: Hashable
    buffers: Mapping[str, Buffer]
    extents: Sequence[Extent]

    @property
    def count(self) -> int:
        """Elements of the run, padding included."""
        return self.buffers["p"].size


class Placement:
    """Maps parameters to extents in four arenas on one device.

    Parameters that are placed together are neighbours in the order given, so that a step needs one
    run for each stretch of them that has equal hyper-parameters and step count, not one for each.

    Parameters
    ----------
    device: Device
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self._segments: list[Mapping[str, Buffer]] = []

    def place(self, counts: Sequence[int]) -> list[Extent]:
        """Make a segment with an extent for each of ``counts``; all arrays are zero.

        Raises
        ------
        ArgumentError
            A count is negative.
        OutOfDeviceMemoryError
            Nothing stays allocated.
        """
        if any(count < 0 for count in counts):
            raise ArgumentError(f"counts must not be negative, not {list(counts)}")
        size = sum(map(_padded, counts))
        arenas: dict[str, Buffer] = {}
        try:
            for name in ARRAYS:
                arenas[name] = self.device.alloc(size, np.float32)
                arenas[name].fill(0.0)
        except BaseException:
            for arena in arenas.values():
                if not arena.freed and not self.device.closed:
                    arena.free()
            raise
        self._segments.append(arenas)
        extents = []
        start = 0
        for count in counts:
            extents.append(Extent(arenas, start, count))
            start = extents[-1].end
        return extents

    def launches(self, keyed: Iterable[tuple[Extent, Hashable]]) -> Iterator[Launch]:
        """Group extents into runs: neighbours of one segment, in order, with equal keys.

        Parameters
        ----------
        keyed: Iterable[tuple[Extent, Hashable]]
            Extents to update, in any order, each with what must be equal within a run.
        """
        order = {id(arenas): index for index, arenas in enumerate(self._segments)}
        pending = sorted(
            ((extent, key) for extent, key in keyed if extent.count),
            key=lambda item: (order[id(item[0].arenas)], item[0].start),
        )
        group: list[Extent] = []
        group_key: Hashable = None
        for extent, key in pending:
            joins = (
                group
                and group_key == key
                and group[-1].arenas is extent.arenas
                and group[-1].end == extent.start
            )
            if group and not joins:
                yield _launch(group_key, group)
                group = []
            group.append(extent)
            group_key = key
        if group:
            yield _launch(group_key, group)

    def free(self) -> None:
        """Give all memory back. On a closed device, or a second time, there is nothing to do."""
        for arenas in self._segments:
            for arena in arenas.values():
                if not arena.freed and not self.device.closed:
                    arena.free()
        self._segments.clear()


def _padded(count: int) -> int:
    return -(-count // _LINE_ELEMENTS) * _LINE_ELEMENTS


def _launch(key: Hashable, extents: Sequence[Extent]) -> Launch:
    start, stop = extents[0].start, extents[-1].start + extents[-1].count
    arenas = extents[0].arenas
    buffers = {name: arena[start:stop] for name, arena in arenas.items()}
    return Launch(key, buffers, tuple(extents))
