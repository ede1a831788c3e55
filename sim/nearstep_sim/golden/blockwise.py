"""State in 8 bits: codes of a dynamic map, and a scale for each 256 elements, in numpy.

A group of 256 elements is divided by its largest magnitude, 1e-12 at least, and each quotient
becomes the number of the nearest entry of a map of 256 values, whose spacing grows with their
magnitude. A tie selects the upper entry. A NaN makes its whole group NaN, and so does an infinity,
but with the signed map the infinite elements become -infinity. Every NaN is the default one.

Bits are those of torchao's `OptimState8bit` on a CPU.

Ref: Dettmers, Lewis, Shleifer and Zettlemoyer, 8-bit Optimizers via Block-wise Quantization,
ICLR 2022, sections 2.1 and 2.2; Dettmers, 8-Bit Approximations for Parallelism in Deep Learning,
ICLR 2016.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden.fp import canonical32

__all__ = [
    "GROUP",
    "Blockwise",
    "check_values",
    "codes_of",
    "dequantize",
    "dynamic_map",
    "pack",
    "quantize",
    "unpack",
]

GROUP = 256
"""Elements that share a scale."""

ENTRIES = 256
DECADES = 7
"""Powers of ten that the map covers."""

SCALE_BYTES = 4

SMALLEST_SCALE = np.float32(1e-12)


class Blockwise(NamedTuple):
    """An array in 8 bits.

    Attributes
    ----------
    codes : uint8, shape (n,): entries of the map.
    scales : float32, one for each group; the last group may be short.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


@cache
def dynamic_map(signed: bool) -> NDArray[np.float32]:
    """Return the 256 values, ascending: half of them negative, or none."""
    values = [0.0, 1.0]
    for decade in range(DECADES):
        edges = _linspace(2 ** (decade if signed else decade + 1) + 1)
        means = (edges[:-1] + edges[1:]) / np.float32(2)
        scaled = np.float32(10.0 ** (decade - DECADES + 1)) * means
        values += scaled.tolist()
        if signed:
            values += (-scaled).tolist()
    assert len(values) == ENTRIES
    return np.array(sorted(values), np.float32)


def _linspace(count: int) -> NDArray[np.float32]:
    """Numbers from 0.1 to 1 in equal steps: counted from the nearer end and rounded once, as torch
    does."""
    low, high = np.float32(0.1), np.float32(1)
    step, place = float((high - low) / np.float32(count - 1)), np.arange(count)
    up, down = float(low) + step * place, float(high) - step * (count - 1 - place)
    return np.where(place < count // 2, up, down).astype(np.float32)


def check_values(values: NDArray[np.float32]) -> None:
    """Raise `TypeError` unless values are float32 of shape (n,)."""
    if values.dtype != np.float32 or values.ndim != 1:
        raise TypeError(f"values must be float32 of one dimension, not {values.dtype}")


def quantize(values: NDArray[np.float32], *, signed: bool) -> Blockwise:
    """Quantize float32 of shape (n,) to 8 bits."""
    check_values(values)
    groups = -(-values.size // GROUP)
    padded = np.zeros(groups * GROUP, np.float32)
    padded[: values.size] = values
    rows = padded.reshape(groups, GROUP)
    with np.errstate(all="ignore"):
        scales = np.maximum(np.abs(rows).max(1, initial=0.0), SMALLEST_SCALE)  # NaN passes both
        parts = (rows / scales[:, None]).reshape(-1)[: values.size]
    return Blockwise(codes_of(parts, signed=signed), canonical32(scales))


def codes_of(parts: NDArray[np.float32], *, signed: bool) -> NDArray[np.uint8]:
    """Return the codes of elements divided by the scale of their group; 0 for a NaN."""
    table = dynamic_map(signed)
    with np.errstate(all="ignore"):
        known = np.nan_to_num(parts, nan=-np.inf)
        below = np.maximum(np.searchsorted(table, known, side="right") - 1, 0)
        above = np.minimum(below + 1, ENTRIES - 1)
        half = (table[above] - table[below]) * np.float32(0.5)
        codes = np.where(parts - table[below] >= half, above, below)
    return codes.astype(np.uint8)


def dequantize(given: Blockwise, *, signed: bool) -> NDArray[np.float32]:
    """Convert 8 bits to float32 of shape (n,)."""
    scales = np.repeat(given.scales, GROUP)[: given.codes.size]
    with np.errstate(all="ignore"):
        return canonical32(dynamic_map(signed)[given.codes] * scales)


def pack(given: Blockwise, *, elements: int, scale_bytes: int) -> NDArray[np.uint8]:
    """Return the bytes of an array in memory: blocks, each with its scales, then its codes.

    Parameters
    ----------
    elements : elements of a block, a multiple of 256; the last block has the rest.
    scale_bytes : bytes of the scales of a block, also of the last; unused scales are 0.
    """
    groups = elements // GROUP
    parts: list[NDArray[np.uint8]] = []
    for number, start in enumerate(range(0, given.codes.size, elements)):
        scales = np.zeros(scale_bytes // SCALE_BYTES, np.float32)
        own = given.scales[number * groups :][:groups]
        scales[: own.size] = own
        parts += [scales.view(np.uint8), given.codes[start : start + elements]]
    return np.concatenate([np.empty(0, np.uint8), *parts])


def unpack(data: NDArray[np.uint8], *, elements: int, scale_bytes: int) -> Blockwise:
    """Invert `pack`.

    Raises
    ------
    ValueError : the last block has no code.
    """
    rest = data.size % (elements + scale_bytes)
    if 0 < rest <= scale_bytes:
        raise ValueError(f"an array of {data.size} bytes has a last block without a code")
    codes, scales = [np.empty(0, np.uint8)], [np.empty(0, np.float32)]
    for start in range(0, data.size, elements + scale_bytes):
        block = data[start : start + elements + scale_bytes]
        own = block[scale_bytes:]
        groups = -(-own.size // GROUP)
        codes.append(own)
        scales.append(np.ascontiguousarray(block[: groups * SCALE_BYTES]).view(np.float32))
    return Blockwise(np.concatenate(codes), np.concatenate(scales))
