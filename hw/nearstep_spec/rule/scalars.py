"""Numbers that the host computes once a step, for registers of the device."""

import numpy as np

__all__ = ["LARGEST", "float32"]

LARGEST = float(np.finfo(np.float32).max)
"""Largest finite number of a register."""


def float32(number: float) -> float:
    """`number` rounded to binary32, to nearest even; overflow gives infinity."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(number))
