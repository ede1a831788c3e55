"""Pieces of a step: what of it is on the device's bus, or in its kernels, at one time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from nearstep.placement import Launch


class Cut(NamedTuple):
    """Elements [start, stop) of the segment, all of a launch or some."""

    launch: Launch
    start: int
    stop: int

    def has(self, channel: int) -> bool:
        """Whether some of it lies on a channel."""
        first, last = self.launch.segment.stripes.span(self.start, self.stop, channel)
        return first < last


Work = Sequence[Sequence[Sequence[Cut]]]
"""By channel, what it does in turn: pieces."""


def pieces(
    launches: Iterable[Launch], elements: int | None, first: int, *, whole: bool
) -> list[list[Cut]]:
    """Launches, in order, as pieces of `elements` or some more, of the last one less.

    A launch is cut only where the last channel has had its turn, so that a piece has the same
    number of elements on each channel.

    Parameters
    ----------
    launches
    elements : at least 1. None: all is one piece.
    first : instead of `elements`, of the first piece.
    whole : launches are not cut.
    """
    found: list[list[Cut]] = []
    left = 0
    for launch in launches:
        stripes = launch.segment.stripes
        turn = stripes.block * stripes.channels
        start = launch.start
        while start < launch.stop:
            if not found or (elements is not None and left <= 0):
                left = elements if found and elements is not None else first
                found.append([])
            end = launch.stop
            if elements is not None and not whole:
                end = min(end, -(-(start + left) // turn) * turn)
            found[-1].append(Cut(launch, start, end))
            left -= end - start
            start = end
    return found
