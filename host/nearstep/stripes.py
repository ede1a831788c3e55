"""Blocks of an array, dealt out to memory channels in turn."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_spec.blockwise import BlockLayout


@dataclass(frozen=True)
class Stripes:
    """Block k of an array is on channel k modulo `channels`, behind earlier blocks.

    A range of the array is one range on each channel, and channels differ by at most one block of
    each array.

    Parameters
    ----------
    block : elements of a block.
    """

    block: int
    channels: int

    def in_bytes(self, layout: BlockLayout) -> Stripes:
        """How the bytes of an array in 8 bits are striped, whose blocks are those of `layout`."""
        return Stripes(layout.nbytes(layout.elements), self.channels)

    def before(self, element: int, channel: int) -> int:
        """How many of the first `element` elements are on a channel."""
        rounds, over = divmod(element, self.block * self.channels)
        return rounds * self.block + min(max(over - channel * self.block, 0), self.block)

    def span(self, start: int, stop: int, channel: int) -> tuple[int, int]:
        """Range, among a channel's elements, of those in [start, stop) of the array."""
        if self.channels == 1:
            return start, stop
        return self.before(start, channel), self.before(stop, channel)

    def element(self, place: int, channel: int) -> int:
        """Index in the array of the element with index `place` among those of a channel."""
        rounds, within = divmod(place, self.block)
        return (rounds * self.channels + channel) * self.block + within

    def locate(self, elements: NDArray[np.intp]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Channel of each of these elements of the array, and its index among those of the channel.

        The indices on one channel ascend if `elements` do.
        """
        blocks, within = np.divmod(elements, self.block)
        rounds, channels = np.divmod(blocks, self.channels)
        return channels, rounds * self.block + within

    def gather(self, data: NDArray[Any], start: int, channel: int) -> NDArray[Any]:
        """The elements of a channel, of shape (n,), in `data`, which begins at `start`."""
        if self.channels == 1:
            return data
        first, last = self.span(start, start + data.size, channel)
        out = np.empty(last - first, data.dtype)
        for theirs, ours in self._pieces(start, data.size, channel):
            out[ours] = data[theirs]
        return out

    def scatter(self, part: NDArray[Any], out: NDArray[Any], start: int, channel: int) -> None:
        """Copy the elements of a channel to `out`, which begins at `start`."""
        for theirs, ours in self._pieces(start, out.size, channel):
            out[theirs] = part[ours]

    def _pieces(self, start: int, count: int, channel: int) -> Iterator[tuple[slice, slice]]:
        """Slices of each block of a channel within a range: in the range, and in the channel's part
        of the range."""
        first = self.before(start, channel)
        turn = self.block * self.channels
        at = start // turn * turn + channel * self.block
        while at < start + count:
            low, high = max(at, start), min(at + self.block, start + count)
            if low < high:
                ours = self.before(low, channel) - first
                yield slice(low - start, high - start), slice(ours, ours + high - low)
            at += turn
