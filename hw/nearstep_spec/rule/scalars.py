"""Numbers that the host computes once a step and the device keeps in registers."""

import numpy as np

__all__ = ["LARGEST", "float32"]

LARGEST = float(np.finfo(np.float32).max)
"""Of the finite numbers that a register holds."""


def float32(number: float) -> float:
    """`number` rounded to binary32, to nearest even; overflow gives infinity."""
    with np.errstate(over="ignore", under="ignore"):
        return float(np.float32(number))
