"""Bit-exact model of stochastic rounding to bfloat16, in numpy."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nearstep_spec.fp import BF16
from nearstep_spec.rounding import (
    CALL_ELEMENTS,
    INJECTED,
    PARITY,
    RANDOM_BITS,
    ROTATIONS,
    ROUNDS,
    STREAM_BIT,
    WORD_BITS,
)

__all__ = ["Draw", "narrow_with", "random_bits", "round_stochastically", "threefry2x32"]

Words = NDArray[np.uint32]

_MASK = (1 << WORD_BITS) - 1


@dataclass(frozen=True, kw_only=True)
class Draw:
    """Random bits that round the elements of an array, see `nearstep_spec.rounding`.

    Parameters
    ----------
    index, within : index of the first element, and its offset in its block.
    block, skip : after each `block` elements the index is incremented by `skip` in addition.
    """

    seed: int
    step: int
    stream: int
    index: int = 0
    within: int = 0
    block: int = 1 << 62
    skip: int = 0

    def after(self, elements: int) -> Self:
        """Return the numbering without the first elements of the array."""
        blocks, within = divmod(self.within % self.block + elements, self.block)
        return replace(self, index=self.index + elements + blocks * self.skip, within=within)

    def indices(self, size: int) -> NDArray[np.uint64]:
        """Return the indices of the first `size` elements, of shape (size,)."""
        place = np.arange(size, dtype=np.uint64)
        blocks = (place + np.uint64(self.within % self.block)) // np.uint64(self.block)
        return np.uint64(self.index) + place + blocks * np.uint64(self.skip)


def threefry2x32(low: Words, high: Words, key: tuple[int, int]) -> tuple[Words, Words]:
    """Threefry-2x32 with 13 rounds.

    Parameters
    ----------
    low, high : uint32, of one shape: words of the counters.
    key : two words.
    """
    words = (*key, key[0] ^ key[1] ^ PARITY)

    def inject(number: int) -> tuple[int, int]:
        return words[number % 3], (words[(number + 1) % 3] + number) & _MASK

    first, second = inject(0)
    low, high = low + np.uint32(first), high + np.uint32(second)
    for number in range(ROUNDS):
        bits = ROTATIONS[number % len(ROTATIONS)]
        low = low + high
        high = ((high << np.uint32(bits)) | (high >> np.uint32(WORD_BITS - bits))) ^ low
        if (number + 1) % INJECTED == 0:
            first, second = inject((number + 1) // INJECTED)
            low, high = low + np.uint32(first), high + np.uint32(second)
    return low, high


def random_bits(draw: Draw, size: int) -> NDArray[np.uint16]:
    """Random bits of the first `size` elements."""
    index = draw.indices(size)
    number = index // np.uint64(CALL_ELEMENTS)
    low = (number & np.uint64(_MASK)).astype(np.uint32)
    high = (number >> np.uint64(WORD_BITS)).astype(np.uint32)
    high |= np.uint32(draw.stream << STREAM_BIT)
    words = threefry2x32(low, high, (draw.seed, draw.step))
    place = (index % np.uint64(CALL_ELEMENTS)).astype(np.uint32) * np.uint32(RANDOM_BITS)
    word = np.where(place < WORD_BITS, *words)
    return (word >> (place % np.uint32(WORD_BITS))).astype(np.uint16)


def narrow_with(a: NDArray[np.float32], random: NDArray[np.uint16]) -> NDArray[np.uint16]:
    """float32 as patterns of BF16, each rounded with 16 bits; a NaN is the default quiet NaN."""
    if a.dtype != np.float32:
        raise TypeError(f"operands must be float32, not {a.dtype}")
    words = a.view(np.uint32) + random.astype(np.uint32)
    bits = (words >> np.uint32(RANDOM_BITS)).astype(np.uint16)
    return np.where(np.isnan(a), np.uint16(BF16.quiet_nan), bits)


def round_stochastically(a: NDArray[np.float32], draw: Draw) -> NDArray[np.uint16]:
    """float32, of shape (n,), as patterns of BF16, rounded stochastically."""
    return narrow_with(a, random_bits(draw, a.size))
