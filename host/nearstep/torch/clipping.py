"""The factor that undoes the scale of gradients and bounds their norm."""

from __future__ import annotations

import math

EPSILON = 1e-6
"""Added to the norm, as in `torch.nn.utils.clip_grad_norm_`."""


def gradient_norm(sum_of_squares: float, scale: float = 1.0) -> float:
    """2-norm of gradients that were multiplied by `scale` before their squares were summed."""
    return math.sqrt(sum_of_squares) / scale


def clip_coefficient(norm: float, max_norm: float | None, scale: float = 1.0) -> float:
    """Factor that divides gradients by `scale` and bounds their norm.

    It is computed in binary64: min(1, max_norm / (norm + 1e-6)) / scale. The register of the kernel
    rounds it to binary32, once.

    Parameters
    ----------
    norm : of the gradients without the scale; not used without a bound.
    max_norm : the bound; None is no bound.
    """
    clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + EPSILON))
    return clip / scale
