"""Numbers that the host computes once a step, for registers of the device."""

import numpy as np

__all__ = ["LARGEST", "bfloat16", "float32"]

LARGEST = float(np.finfo(np.float32).max)
"""Largest finite number of a register."""


def float32(number: float) -> float:
    """`number` rounded to binary32, to nearest even; overflow gives infinity."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(number))


def bfloat16(number: float) -> float:
    """`number` rounded to binary32, then to bfloat16, to nearest even, as torch rounds it."""
    word = int(np.float32(float32(number)).view(np.uint32))
    word += 0x7FFF + (word >> 16 & 1)
    return float(np.uint32(word & 0xFFFF_0000).view(np.float32))
