"""Compressed gradients in device memory: index and value of each element, by run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep.buffer import Buffer
from nearstep.placement import LINE_ELEMENTS, Extent, Launch, Segment, padded
from nearstep.torch.compression import Compressed, Compression
from nearstep.updater.formats import DTYPES

_LINE = 2 * LINE_ELEMENTS
"""Pairs after which indices and values of any format both begin a line."""


class PairSpace:
    """Room for the pairs of the extents of one segment.

    Each extent has room on each channel for the most pairs that can fall there, in the order of the
    extents. So the pairs of a run, whose extents are neighbours, have room behind one another.

    Parameters
    ----------
    segment: Segment
    extents: Sequence[Extent]
        All of the segment, in order.
    compression: Compression

    Raises
    ------
    OutOfDeviceMemoryError
    """

    def __init__(
        self, segment: Segment, extents: Sequence[Extent], compression: Compression
    ) -> None:
        self._stripes = segment.stripes
        channels = range(self._stripes.channels)
        sizes = [0 for _ in channels]
        self._starts: dict[int, list[int]] = {}
        for extent in extents:
            self._starts[extent.start] = list(sizes)
            for channel in channels:
                first, last = self._stripes.span(extent.start, extent.start + extent.count, channel)
                most = min(last - first, compression.kept_of(extent.count))
                sizes[channel] += padded(most, _LINE)
        dtypes = {"index": np.dtype(np.uint32), "value": DTYPES[compression.format]}
        self._arenas = segment.reserve_lists(sizes, dtypes)

    def write(
        self, launch: Launch, gradients: Mapping[Extent, Compressed]
    ) -> Iterator[tuple[Buffer, Buffer]]:
        """Copy the pairs of each run of a launch to the device; yields their indices and values.

        Indices count from the first element of the run, and ascend.
        """
        first = launch.extents[0].start
        values = np.concatenate([gradients[e].value for e in launch.extents])
        if self._stripes.channels == 1:
            index = np.empty(values.size, np.uint32)
            at = 0
            for e in launch.extents:
                part = gradients[e].index
                np.add(part, e.start - first, out=index[at : at + part.size], casting="unsafe")
                at += part.size
            yield self._copied(0, first, index, values)
            return
        elements = np.concatenate([e.start + gradients[e].index for e in launch.extents])
        channels, places = self._stripes.locate(elements)
        for channel in launch.parts:
            here = channels == channel
            index = (places[here] - self._stripes.before(first, channel)).astype(np.uint32)
            yield self._copied(channel, first, index, values[here])

    def _copied(
        self, channel: int, first: int, index: NDArray[np.uint32], values: NDArray[np.generic]
    ) -> tuple[Buffer, Buffer]:
        """Copy the pairs of a run whose first extent starts at element ``first``."""
        start, arena = self._starts[first][channel], self._arenas[channel]
        indices, of_values = (
            arena[name][start : start + index.size] for name in ("index", "value")
        )
        indices.write(index)
        of_values.write(values)
        return indices, of_values
