"""State in 8 bits: codes of a dynamic map, and a scale for each 256 elements.

An element is the map's entry for its code, times the scale of its group. A group's scale is its
largest magnitude, at least 1e-12; the code selects the entry nearest to the element divided by the
scale, the upper one of a tie. A group with a NaN becomes NaN; an infinity is the scale of its
group.

Ref: Dettmers, Lewis, Shleifer and Zettlemoyer, 8-bit Optimizers via Block-wise Quantization, ICLR
2022, sections 2.1 and 2.2; bits are those of torchao's `OptimState8bit` on a CPU.
"""

import itertools
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType

__all__ = [
    "CODES",
    "DYNAMIC8",
    "DYNAMIC8_UNSIGNED",
    "GROUP",
    "SIGNED",
    "SMALLEST_SCALE",
    "BlockLayout",
    "dynamic_map",
    "thresholds",
]

GROUP = 256
"""Elements that share a scale."""

CODES = 256
"""Entries of a map."""

SCALE_BYTES = 4
"""A scale is binary32."""

DYNAMIC8, DYNAMIC8_UNSIGNED = "dynamic8", "dynamic8u"

SIGNED: Mapping[str, bool] = MappingProxyType({DYNAMIC8: True, DYNAMIC8_UNSIGNED: False})
"""Formats, and whether half of the entries of the map are negative."""

_DECADES = 7


@dataclass(frozen=True)
class BlockLayout:
    """Layout of an array in 8 bits: blocks, each with its scales, then its codes.

    Block 0 begins the array. The last block has codes for the remaining elements only; its scales
    have full size, unused ones 0.

    Attributes
    ----------
    elements : of a block, a multiple of `GROUP`.
    scale_bytes : of the scales of a block, padded to a beat.

    Ref: AXDIMM paper, section 3.4 (block).
    """

    elements: int
    scale_bytes: int

    def nbytes(self, count: int) -> int:
        """Bytes of an array of `count` elements."""
        return -(-count // self.elements) * self.scale_bytes + count

    def count(self, nbytes: int) -> int:
        """Elements of an array of `nbytes`.

        Raises
        ------
        ValueError : no array has as many bytes.
        """
        whole, rest = divmod(nbytes, self.elements + self.scale_bytes)
        if rest and rest <= self.scale_bytes:
            raise ValueError(f"No array in 8 bits has {nbytes} bytes: its last block has no code")
        return whole * self.elements + max(0, rest - self.scale_bytes)

    def offset(self, first: int) -> int:
        """Byte at which the block of element `first` begins.

        Raises
        ------
        ValueError : the element is not the first of its block.
        """
        if first % self.elements:
            raise ValueError(f"Element {first} begins no block of {self.elements}")
        return first // self.elements * (self.elements + self.scale_bytes)


@cache
def dynamic_map(*, signed: bool) -> tuple[int, ...]:
    """Bit patterns of the binary32 values of the codes, ascending by value."""
    values = [0.0, 1.0]
    for decade in range(_DECADES):
        edges = _edges(1 << decade if signed else 2 << decade)
        factor = _round(float(f"1e{decade - _DECADES + 1}"))
        for low, high in itertools.pairwise(edges):
            value = _round(factor * _round(_round(low + high) / 2))
            values += [value, -value] if signed else [value]
    assert len(values) == CODES
    return tuple(_bits(value) for value in sorted(values))


def _edges(steps: int) -> list[float]:
    """Compute binary32 numbers from 0.1 to 1 in equal steps, from the nearer end, rounded once."""
    low, high = _round(0.1), 1.0
    step = _round(_round(high - low) / steps)
    middle = (steps + 1) // 2
    return [
        _round(low + step * place if place < middle else high - step * (steps - place))
        for place in range(steps + 1)
    ]


@cache
def thresholds(*, signed: bool) -> tuple[int, ...]:
    """Compute the bit patterns of the least binary32 quotients with codes 1 to 255.

    Both zeros have one code, so none of these is a zero.
    """
    values = [_value(bits) for bits in dynamic_map(signed=signed)]
    found = []
    for below, above in itertools.pairwise(values):
        half = _round(_round(above - below) / 2)
        low, high = _order(_bits(below)), _order(_bits(above))
        while low < high:
            middle = (low + high) // 2
            if _round(_value(_pattern(middle)) - below) >= half:
                high = middle
            else:
                low = middle + 1
        found.append(_pattern(low))
    return tuple(found)


def _round(x: float) -> float:
    """Round to binary32. An operation on two such numbers in binary64 is rounded as if once."""
    rounded: float = struct.unpack("<f", struct.pack("<f", x))[0]
    return rounded


def _bits(x: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", x))[0])


def _value(bits: int) -> float:
    value: float = struct.unpack("<f", struct.pack("<I", bits))[0]
    return value


def _order(bits: int) -> int:
    """Numbers of patterns, in the order of their values; -0 comes before 0."""
    return -(bits & 0x7FFF_FFFF) - 1 if bits >> 31 else bits


def _pattern(order: int) -> int:
    return order if order >= 0 else 0x8000_0000 | (-order - 1)


SMALLEST_SCALE = _bits(1e-12)
"""Bit pattern of the least scale."""
