"""Compressed gradients in device memory: index and value of each element, by run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearstep.buffer import Buffer
from nearstep.placement import LINE_ELEMENTS, Extent, Launch, Segment, padded
from nearstep.torch.compression import Compressed, Compression
from nearstep.updater.formats import DTYPES
from nearstep.updater.pairs import Pairs

_LINE = 2 * LINE_ELEMENTS
"""Pairs after which indices and values of any format both begin a line."""


class PairList(NamedTuple):
    """Pairs of a run, and where they go.

    Attributes
    ----------
    cut : elements of the segment.
    pairs : indices count from the first element of the run, and ascend.
    data : what is to be written there: indices, values.
    rooms : both to the end of their last lines, which are nobody else's.
    """

    channel: int
    cut: range
    pairs: Pairs
    data: Sequence[NDArray[np.generic]]
    rooms: Sequence[Buffer]

    def writes(self, *, lines: bool) -> Iterator[tuple[Buffer, NDArray[np.generic]]]:
        """What is to be written, and where.

        Parameters
        ----------
        lines : write whole lines, with 0 in the rest of the last one.
        """
        for room, data in zip(self.rooms, self.data, strict=True):
            if room.size and lines:
                yield room, np.pad(data, (0, room.size - data.size))
            elif room.size:
                yield room[: data.size], data


class PairSpace:
    """Room for the pairs of the extents of one segment.

    Each extent has room on each channel for the most pairs that can fall there, in the order of the
    extents. So the pairs of a run, whose extents are neighbours, have room behind one another.

    Parameters
    ----------
    extents : all of the segment, in order.
    cut : a launch may be cut, into pieces of so many elements, at the ends of less. None: it is
        not.
    """

    def __init__(
        self,
        segment: Segment,
        extents: Sequence[Extent],
        compression: Compression,
        cut: int | None = None,
    ) -> None:
        self._stripes = segment.stripes
        self._compression = compression
        channels = range(self._stripes.channels)
        sizes = [0 for _ in channels]
        self._starts: dict[int, list[int]] = {}
        for extent in extents:
            self._starts[extent.start] = list(sizes)
            for channel in channels:
                first, last = self._stripes.span(extent.start, extent.start + extent.count, channel)
                most = min(last - first, compression.kept_of(extent.count))
                ends = 0 if cut is None else extent.count // cut + 2
                sizes[channel] += padded(most, _LINE) + ends * _LINE
        dtypes = {"index": np.dtype(np.uint32), "value": DTYPES[compression.format]}
        self._arenas = segment.reserve_lists(sizes, dtypes)

    def lists(
        self,
        launch: Launch,
        gradients: Mapping[Extent, Compressed],
        cuts: Sequence[Sequence[range]],
    ) -> Iterator[PairList]:
        """The pairs of each run of a launch that each channel cuts, at ends of blocks, into these
        elements of the segment; by channel, then in order.

        They are still to be written.
        """
        values = np.concatenate([gradients[e].value for e in launch.extents])
        if self._stripes.channels == 1 and len(cuts[0]) == 1:  # all of the launch
            index = np.empty(values.size, np.uint32)
            at = 0
            for e in launch.extents:
                part = gradients[e].index
                room = index[at : at + part.size]
                np.add(part, e.start - launch.start, out=room, casting="unsafe")
                at += part.size
            for channel in launch.channels:
                yield self._list(channel, cuts[0][0], self._starts[launch.start][0], index, values)
            return
        elements = np.concatenate([e.start + gradients[e].index for e in launch.extents])
        channels, places = self._stripes.locate(elements)
        for channel in launch.channels:
            at = self._starts[launch.start][channel]
            for cut in cuts[channel]:
                inside = slice(*np.searchsorted(elements, (cut.start, cut.stop)))
                first, last = self._stripes.span(cut.start, cut.stop, channel)
                if first == last:
                    continue
                here = channels[inside] == channel
                index = (places[inside][here] - first).astype(np.uint32)
                listed = self._list(channel, cut, at, index, values[inside][here])
                at += padded(listed.pairs.size, _LINE)
                yield listed

    def _list(
        self,
        channel: int,
        cut: range,
        at: int,
        index: NDArray[np.uint32],
        values: NDArray[np.generic],
    ) -> PairList:
        """Pairs of a cut that lie from element `at` of the lists on."""
        first, last = self._stripes.span(cut.start, cut.stop, channel)
        index, values = self._compression.records(index, values, last - first)
        stop, end = at + index.size, at + padded(index.size, _LINE)
        rooms = [self._arenas[channel][name] for name in ("index", "value")]
        pairs = Pairs(rooms[0][at:stop], rooms[1][at:stop], self._compression.form)
        return PairList(channel, cut, pairs, (index, values), [room[at:end] for room in rooms])
