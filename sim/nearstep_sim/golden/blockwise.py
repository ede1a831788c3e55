"""Moments in 8 bits, block by block: a prototype in numpy, which no kernel has.

A block of 256 elements is divided by its largest magnitude, and each quotient becomes the number
of the nearest entry of a map of 256 values, whose spacing grows with their magnitude. Of values in
the middle of two entries the upper one is taken. A block with an infinity becomes NaN where it was
infinite and zero elsewhere; a NaN makes its whole block NaN.

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

__all__ = ["BLOCK", "Blockwise", "dequantize", "dynamic_map", "quantize"]

BLOCK = 256
"""Elements that share a scale."""

ENTRIES = 256
DECADES = 7
"""Powers of ten that the map reaches over."""

SMALLEST_SCALE = np.float32(1e-12)


class Blockwise(NamedTuple):
    """An array in 8 bits.

    Attributes
    ----------
    codes : uint8, shape (n,): entries of the map.
    scales : float32, one for each block.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes


@cache
def dynamic_map(signed: bool) -> NDArray[np.float32]:
    """The 256 values, ascending: with half of them negative, or with none."""
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


def quantize(values: NDArray[np.float32], *, signed: bool) -> Blockwise:
    """float32, of shape (n,), in 8 bits; the last block may be shorter."""
    if values.dtype != np.float32 or values.ndim != 1:
        raise TypeError(f"values must be float32 of one dimension, not {values.dtype}")
    table = dynamic_map(signed)
    blocks = -(-values.size // BLOCK)
    padded = np.zeros(blocks * BLOCK, np.float32)
    padded[: values.size] = values
    rows = padded.reshape(blocks, BLOCK)
    with np.errstate(all="ignore"):
        # A NaN passes both: amax gives it, and clip keeps it.
        scales = np.maximum(np.abs(rows).max(1, initial=0.0), SMALLEST_SCALE)
        parts = (rows / scales[:, None]).reshape(-1)[: values.size]
        known = np.nan_to_num(parts, nan=-np.inf)
        below = np.maximum(np.searchsorted(table, known, side="right") - 1, 0)
        above = np.minimum(below + 1, ENTRIES - 1)
        half = (table[above] - table[below]) * np.float32(0.5)
        codes = np.where(parts - table[below] >= half, above, below)
    return Blockwise(codes.astype(np.uint8), scales)


def dequantize(given: Blockwise, *, signed: bool) -> NDArray[np.float32]:
    """Back to float32, of shape (n,)."""
    scales = np.repeat(given.scales, BLOCK)[: given.codes.size]
    with np.errstate(all="ignore"):
        product: NDArray[np.float32] = dynamic_map(signed)[given.codes] * scales
    return product
