"""Elements of every format that arrays of a kernel can have, and indices of pairs."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden import fp
from nearstep_spec.fp import BF16, FP16, FP32

FORMATS = {"fp32": (FP32, np.float32), "fp16": (FP16, np.float16), "bf16": (BF16, np.uint16)}
"""Format and dtype by name."""

NARROW = ("fp16", "bf16")

SPECIALS = np.array(
    [0, 1 << 31, 1, 0x8000_0001, 0x007F_FFFF, 0x0080_0000, 0x2B8C_BCCC, 0x7F7F_FFFF, 0xFF7F_FFFF,
     0x7F7F_8000, 0x7F80_0000, 0xFF80_0000, 0x7F80_0001, 0x7FC0_0000, 0xFFC1_2345, 0x3F80_0000],
    np.uint32,
)  # fmt: skip
"""Patterns of binary32: zeros, subnormals, the ends of the normal numbers, infinities, NaN of both
kinds, the least scale of 8 bits, one."""


def format_of(dtype: np.dtype) -> str:
    """The format that elements of a dtype have."""
    return next(name for name, (_, each) in FORMATS.items() if dtype == each)


def gradients(rng: np.random.Generator, count: int, form: str) -> NDArray:
    """Patterns of a format: numbers of any size, every eighth of them special."""
    fmt, dtype = FORMATS[form]
    numbers = narrowed(rng.standard_normal(count).astype(np.float32), form)
    bits = numbers.view(f"u{numbers.itemsize}").copy()
    infinity = fmt.infinity
    specials = np.array(
        [0, 1, 3, fmt.sign_bit | 2, infinity, fmt.sign_bit | infinity, infinity + 1,
         fmt.quiet_nan, fmt.sign_bit | fmt.quiet_nan | 5, infinity - 1, fmt.sign_bit, 0x101]
    )  # fmt: skip
    chosen = rng.random(count) < 0.125
    bits[chosen] = rng.choice(specials, np.count_nonzero(chosen))
    return bits.view(dtype)


def widened(values: NDArray, form: str) -> NDArray[np.float32]:
    """Patterns of a format as float32."""
    return values if form == "fp32" else fp.widen32(values.view(np.uint16), FORMATS[form][0])


def narrowed(values: NDArray[np.float32], form: str) -> NDArray:
    """float32 as they lie in memory in a format, rounded once."""
    fmt, dtype = FORMATS[form]
    return values if form == "fp32" else fp.narrow32(values, fmt).view(dtype)


def indices(rng: np.random.Generator, count: int, pairs: int, group: int) -> NDArray[np.uint32]:
    """Indices below `count` in the order of groups of elements, each group in any order."""
    chosen = rng.integers(0, count, pairs)
    return chosen[np.argsort(chosen // group, kind="stable")].astype(np.uint32)
