"""The moves of an iteration in order, for runs on devices and modelled ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from nearstep.plan.pieces import GRADIENT, Item, Piece
from nearstep.plan.residency import Policy, Residency

Kind = Literal["fetch", "evict", "drop", "load", "send", "update"]
"""Moves: fetch a parameter to the compute device; evict an array to the drives, or drop it, because
the drives have it; load an array from the drives; send a gradient to memory; update.
"""


@dataclass(frozen=True, kw_only=True)
class Move:
    """A move of one array.

    Attributes
    ----------
    item : the array; for an update, the parameter.
    source : place from which a fetch reads the parameter.
    """

    kind: Kind
    item: Item
    source: Literal["memory", "drives"] = "memory"

    @property
    def nbytes(self) -> int:
        """Bytes of the transfer; 0 of an update and of a drop."""
        return 0 if self.kind in ("update", "drop") else self.item.nbytes


class Fetches:
    """Pieces that the compute device lacks before a layer: those of several layers once an
    iteration."""

    def __init__(
        self, pieces: Sequence[Sequence[Piece]], borrowed: Mapping[int, Sequence[Piece]]
    ) -> None:
        self._pieces = pieces
        self._borrowed = borrowed
        self._shared = {piece for each in borrowed.values() for piece in each}
        self._kept: set[Piece] = set()

    def of(self, layer: int) -> list[Piece]:
        """Return the pieces to fetch before a layer is computed, forward or backward."""
        needed = (*self._pieces[layer], *self._borrowed.get(layer, ()))
        found = [piece for piece in needed if piece not in self._kept]
        self._kept |= self._shared.intersection(found)
        return found

    def end_iteration(self) -> None:
        """Free what the compute device keeps."""
        self._kept.clear()


class Schedule:
    """Plan of the moves of each computed layer and each complete gradient.

    Every array is on the drives or in memory: a changed one in memory is written before it is
    evicted. Parameters are read from their current place (AXDIMM, section 5.3: from the drives
    directly to the GPU), and for an update all arrays of a piece are gathered in the memory of its
    channel. A piece that several layers use is fetched once an iteration, and the compute device
    keeps it.

    Parameters
    ----------
    pieces : of each layer.
    borrowed : pieces of other layers that each layer also uses.
    arrays : of the optimizer, `p` first.
    capacity : bytes of memory of each channel.
    from_compute : whether a parameter that an update finds missing in memory is sent by the compute
        device, which has just used it; else it is read from the drives.

    Attributes
    ----------
    peak_on_drives : most bytes of arrays that were on the drives and not in memory.
    """

    def __init__(
        self,
        pieces: Sequence[Sequence[Piece]],
        *,
        borrowed: Mapping[int, Sequence[Piece]] = MappingProxyType({}),
        arrays: Sequence[str] = ("p", "m", "v"),
        capacity: Sequence[int],
        policy: Policy[Item],
        from_compute: bool = True,
    ) -> None:
        self._from_compute = from_compute
        self._pieces = pieces
        self._fetches = Fetches(pieces, borrowed)
        self._arrays = tuple(arrays)
        self._memory = [Residency(i, each, policy) for i, each in enumerate(capacity)]
        self._position = 0
        self._on_drives = 0
        self.peak_on_drives = 0

    def place(self) -> list[Move]:
        """Place the arrays of new parameters in memory in order, the rest on the drives.

        Moves are `send` or `evict`.
        """
        moves: list[Move] = []
        for layer in self._pieces:
            for piece in layer:
                memory = self._memory[piece.channel]
                for item in self.items(piece):
                    if item.nbytes <= memory.free:
                        memory.make_room([item], 0)
                        memory.use(item, updated=True)
                        moves.append(Move(kind="send", item=item))
                    else:
                        self._put(item.nbytes)
                        moves.append(Move(kind="evict", item=item))
        self.end_iteration()
        return moves

    def items(self, piece: Piece) -> list[Item]:
        """Arrays of a piece."""
        return [Item(piece, array) for array in self._arrays]

    def fetch(self, layer: int) -> list[Move]:
        """Plan the fetches of parameters before a layer is computed, forward or backward."""
        moves = []
        for piece in self._fetches.of(layer):
            item = Item(piece, "p")
            memory = self._memory[piece.channel]
            self._position += 1
            if item in memory:
                memory.use(item)
            moves.append(
                Move(kind="fetch", item=item, source="memory" if item in memory else "drives")
            )
        return moves

    def update(self, piece: Piece) -> list[Move]:
        """Plan evictions, reads and the gradient's transfer for the update of a piece, and the
        update.

        Raises
        ------
        NoRoomError : nothing was changed.
        """
        memory = self._memory[piece.channel]
        items, gradient = self.items(piece), Item(piece, GRADIENT)
        missing = [item for item in items if item not in memory]
        gone = memory.make_room([*items, gradient], self._position)
        self._position += 1
        moves = []
        for item, changed in gone:
            if item.array != GRADIENT:
                self._put(item.nbytes)
            moves.append(Move(kind="evict" if changed else "drop", item=item))
        for item in missing:
            self._on_drives -= item.nbytes
            there = item.array == "p" and self._from_compute
            moves.append(Move(kind="send" if there else "load", item=item))
        moves.append(Move(kind="send", item=gradient))
        moves.append(Move(kind="update", item=items[0]))
        for item in (*items, gradient):
            memory.use(item, updated=True)
        return moves

    def end_iteration(self) -> None:
        """End an iteration, when all of its gradients have been used."""
        self._position = 0
        self._fetches.end_iteration()
        for memory in self._memory:
            memory.end_iteration()

    @property
    def peak_bytes(self) -> Sequence[int]:
        """Most bytes that were in use in the memory of each channel, gradients included."""
        return [memory.peak for memory in self._memory]

    def _put(self, nbytes: int) -> None:
        self._on_drives += nbytes
        self.peak_on_drives = max(self.peak_on_drives, self._on_drives)


def uses(
    pieces: Sequence[Sequence[Piece]],
    borrowed: Mapping[int, Sequence[Piece]] = MappingProxyType({}),
    arrays: Sequence[str] = ("p", "m", "v"),
) -> tuple[Mapping[Item, Sequence[int]], int]:
    """Order of uses of an iteration, and its length: layers forward and backward, and in backward
    an update of each piece, the last first (for `nearstep.plan.residency.belady`)."""
    found: dict[Item, list[int]] = {}
    position = 0

    def use(items: Iterable[Item]) -> None:
        nonlocal position
        for item in items:
            found.setdefault(item, []).append(position)
        position += 1

    fetches = Fetches(pieces, borrowed)

    def fetch(layer: int) -> None:
        for piece in fetches.of(layer):
            use([Item(piece, "p")])

    for layer in range(len(pieces)):
        fetch(layer)
    for layer in reversed(range(len(pieces))):
        if layer < len(pieces) - 1:  # the last one was fetched for forward
            fetch(layer)
        for piece in reversed(pieces[layer]):
            use(Item(piece, array) for array in arrays)
    return found, position
