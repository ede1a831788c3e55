"""Operands of update rules that reach every special case, seeded."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

__all__ = ["SPECIALS", "operands", "registers"]

#: Zeros, ends of the subnormal and the normal numbers, around one, infinities, NaNs; both signs.
SPECIALS = np.array(
    [
        0x0000_0000, 0x8000_0000, 0x0000_0001, 0x8000_0001, 0x007F_FFFF, 0x807F_FFFF,
        0x0080_0000, 0x8080_0000, 0x0080_0001, 0x3F7F_FFFF, 0x3F80_0000, 0xBF80_0000,
        0x3F80_0001, 0x3F00_0000, 0x7F7F_FFFF, 0xFF7F_FFFF, 0x7F80_0000, 0xFF80_0000,
        0x7FC0_0000, 0xFFC0_0000, 0x7F80_0001, 0xFFFF_FFFF,
    ],
    np.uint32,
)  # fmt: skip


def operands(names: Sequence[str], count: int, seed: int) -> dict[str, NDArray[np.float32]]:
    """`count` elements for each array named.

    The first 22**n elements are every combination of special patterns where n arrays allow it, then
    random patterns, ordinary numbers, and patterns that differ in few bits from each other.
    """
    rng = np.random.default_rng(seed)
    uniform = rng.integers(0, 2**32, (len(names), count), dtype=np.uint32)
    ordinary = rng.standard_normal((len(names), count)).astype(np.float32)
    ordinary *= (10.0 ** rng.integers(-9, 4, (len(names), count))).astype(np.float32)
    ordinary = ordinary.view(np.uint32)
    close = ordinary[:1] + rng.integers(-2, 3, (len(names), count)).astype(np.uint32)
    close ^= rng.integers(0, 2, (len(names), count), dtype=np.uint32) << np.uint32(31)
    special = SPECIALS[rng.integers(0, len(SPECIALS), (len(names), count))]
    kind = rng.integers(0, 4, count)
    mixed = rng.integers(0, 4, (len(names), count))
    kinds = np.where(rng.random(count) < 0.3, mixed, kind)
    words = np.choose(kinds, [uniform, ordinary, close, special])
    crossed = np.stack(np.meshgrid(*[SPECIALS] * min(len(names), 4), indexing="ij"))
    crossed = crossed.reshape(len(crossed), -1)[:, : count // 2]
    words[: len(crossed), : crossed.shape[1]] = crossed
    return {
        name: np.ascontiguousarray(row).view(np.float32)
        for name, row in zip(names, words, strict=True)
    }


def registers(widths: dict[str, int], seed: int) -> dict[str, float]:
    """A value for each register of a rule; seeds 0 and 1 set all switches to 0 and to 1."""
    rng = np.random.default_rng(seed)
    return {
        name: (int(rng.integers(2)) if seed > 1 else seed)
        if width == 1
        else float(np.float32(rng.normal()))
        for name, width in widths.items()
    }
