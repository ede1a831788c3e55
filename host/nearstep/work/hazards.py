"""Dependencies between operations that access the same bytes."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from sortedcontainers import SortedDict

from nearstep.work.operation import Range

NOBODY = -1


class _Readers(NamedTuple):
    """Operations that have read some bytes since they were written; shared by pieces of them."""

    reader: int
    earlier: _Readers | None


class _Piece(NamedTuple):
    """Bytes from its key to the next piece, or without end.

    Attributes
    ----------
    writer : the last operation that wrote them.
    readers : those that have read them since.
    """

    writer: int
    readers: _Readers | None


class _Space:
    """Pieces of one space, by their first byte."""

    def __init__(self) -> None:
        self._pieces: SortedDict[int, _Piece] = SortedDict({0: _Piece(NOBODY, None)})

    def pieces(self, start: int, stop: int) -> list[_Piece]:
        """Return the pieces that overlap the non-empty range [start, stop)."""
        first = self._pieces.keys()[self._pieces.bisect_right(start) - 1]
        return [self._pieces[at] for at in self._pieces.irange(first, stop, (True, False))]

    def read(self, index: int, start: int, stop: int) -> None:
        """An operation reads [start, stop)."""
        pieces = self._pieces
        for at in self._cut(start, stop):
            pieces[at] = _Piece(pieces[at].writer, _Readers(index, pieces[at].readers))

    def write(self, index: int, start: int, stop: int) -> None:
        """An operation writes [start, stop)."""
        for at in self._cut(start, stop):
            if at != start:
                del self._pieces[at]
        self._pieces[start] = _Piece(index, None)

    def _cut(self, start: int, stop: int) -> list[int]:
        """Cut pieces at start and stop, and return the keys of those between."""
        pieces = self._pieces
        for at in (start, stop):
            if at not in pieces:
                pieces[at] = pieces.peekitem(pieces.bisect_right(at) - 1)[1]
        return list(pieces.irange(start, stop, (True, False)))


class Hazards:
    """Finds read-after-write, write-after-read and write-after-write, in program order.

    A range is found in O(log n); the remaining time is proportional to the pieces that earlier
    operations made there. Only the nearest hazards are returned: the last writer of each byte and
    its readers since. These imply all others.
    """

    def __init__(self) -> None:
        self._spaces: dict[Hashable, _Space] = {}

    def add(self, index: int, reads: Iterable[Range], writes: Iterable[Range]) -> set[int]:
        """Return the operations on which the next one in the program depends.

        Parameters
        ----------
        index : its number, above all earlier ones.
        reads, writes : in any order, and overlapping as they like.
        """
        reads = [each for each in reads if each.start < each.stop]
        writes = [each for each in writes if each.start < each.stop]
        found = self.find(reads, writes)
        for each in reads:
            self._space(each).read(index, each.start, each.stop)
        for each in writes:
            self._space(each).write(index, each.start, each.stop)
        return found

    def find(self, reads: Iterable[Range], writes: Iterable[Range]) -> set[int]:
        """Return the same for an operation outside of the program."""
        found: set[int] = set()
        for each in reads:
            if each.start < each.stop:
                found.update(piece.writer for piece in self._pieces(each))
        for each in writes:
            if each.start < each.stop:
                pieces = self._pieces(each)
                found.update(piece.writer for piece in pieces)
                found.update(_distinct(piece.readers for piece in pieces))
        found.discard(NOBODY)
        return found

    def _pieces(self, where: Range) -> list[_Piece]:
        return self._space(where).pieces(where.start, where.stop)

    def _space(self, where: Range) -> _Space:
        if where.space not in self._spaces:
            self._spaces[where.space] = _Space()
        return self._spaces[where.space]


def _distinct(readers: Iterable[_Readers | None]) -> Iterator[int]:
    """Yield each operation of these lists; shared lists are visited once."""
    seen: set[int] = set()  # by identity: lists live as long as the pieces
    for each in readers:
        while each is not None and id(each) not in seen:
            seen.add(id(each))
            yield each.reader
            each = each.earlier
