"""Pieces of parameters: the unit of moves and updates."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from nearstep.errors import ArgumentError

ELEMENT_BYTES = 4
"""Bytes of an fp32 element."""

GRADIENT = "g"
"""Name of the array of gradients."""


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Parameters that are used together, and the computation that uses them.

    Attributes
    ----------
    parameters : elements of each.
    borrowed : parameters of earlier layers that this layer also uses: index of the layer, and of
        the parameter in it.
    forward_s, backward_s : seconds of the computation alone.
    """

    name: str
    parameters: tuple[int, ...]
    borrowed: tuple[tuple[int, int], ...] = ()
    forward_s: float = 0.0
    backward_s: float = 0.0

    @property
    def elements(self) -> int:
        """Elements of all its parameters."""
        return sum(self.parameters)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A parameter, or a part of a large one.

    Attributes
    ----------
    layer : index of the layer.
    parameter : index of the parameter in it.
    start, stop : range of elements in the parameter.
    channel : number of the channel in whose memory the piece is updated.
    """

    index: int
    layer: int
    parameter: int
    start: int
    stop: int
    channel: int

    @property
    def elements(self) -> int:
        return self.stop - self.start

    @property
    def nbytes(self) -> int:
        """Bytes of one of its arrays."""
        return ELEMENT_BYTES * self.elements


class Item(NamedTuple):
    """An array of a piece."""

    piece: Piece
    array: str

    @property
    def nbytes(self) -> int:
        return self.piece.nbytes

    @property
    def transient(self) -> bool:
        return self.array == GRADIENT


def cut(layers: Sequence[Layer], channels: int, most: int) -> Sequence[Sequence[Piece]]:
    """Cut the parameters of each layer into pieces, and assign channels.

    A piece is assigned to the channel with the fewest bytes so far: round robin for equal sizes
    (AXDIMM, section 5.2). Round robin regardless of size would assign all weights to one channel
    and all biases to another.

    Parameters
    ----------
    most : elements of a piece; larger parameters are cut into parts of nearly equal size.

    Raises
    ------
    ArgumentError : a parameter has no element, or a number is below 1.
    """
    if channels < 1 or most < 1:
        raise ArgumentError(f"channels and most must be at least 1, not {channels} and {most}")
    found: list[list[Piece]] = []
    given = [0] * channels
    count = 0
    for index, layer in enumerate(layers):
        found.append([])
        for parameter, elements in enumerate(layer.parameters):
            if elements < 1:
                raise ArgumentError(f"{layer.name}: elements must be at least 1, not {elements}")
            parts = -(-elements // most)
            for part in range(parts):
                piece = Piece(
                    index=count,
                    layer=index,
                    parameter=parameter,
                    start=elements * part // parts,
                    stop=elements * (part + 1) // parts,
                    channel=given.index(min(given)),
                )
                given[piece.channel] += piece.nbytes
                found[-1].append(piece)
                count += 1
    return found
