"""Blocks: ranges of elements that a step moves and updates together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from nearstep.placement import Launch


class Block(NamedTuple):
    """Elements [start, stop) of a launch's segment."""

    launch: Launch
    start: int
    stop: int

    def span(self, channel: int) -> tuple[int, int]:
        """Elements of the channel's share of the segment: first, and behind the last."""
        return self.launch.segment.stripes.span(self.start, self.stop, channel)

    def has(self, channel: int) -> bool:
        """Whether a channel has elements of the block."""
        first, last = self.span(channel)
        return first < last


Piece = Sequence[Block]
"""Blocks that a channel updates in one turn: between two changes of its mode."""


def pieces(
    launches: Iterable[Launch], elements: int | None, first: int, *, whole: bool
) -> list[list[Block]]:
    """Cut launches, in order, into pieces of at least `elements`; the last one may have fewer.

    A launch is cut only where the last channel has had its turn, so that a piece has the same
    number of elements on each channel.

    Parameters
    ----------
    elements : at least 1. None: all is one piece.
    first : elements of the first piece.
    whole : do not cut launches.
    """
    found: list[list[Block]] = []
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
            found[-1].append(Block(launch, start, end))
            left -= end - start
            start = end
    return found


def subgroups(launches: Iterable[Launch], elements: int) -> Iterator[list[Block]]:
    """Cut launches at the multiples of `elements` of their segments; each piece is one block.

    Ref: Smart-Infinity, section V: subgroup i has the elements from i x D on.
    """
    for launch in launches:
        for start in range(launch.start // elements * elements, launch.stop, elements):
            low, high = max(start, launch.start), min(start + elements, launch.stop)
            yield [Block(launch, low, high)]
