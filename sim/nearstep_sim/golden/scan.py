"""Bit-exact model of the gradient scan: found_inf and the sum of squares in a fixed order."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden import fp

__all__ = ["PARTIALS", "scan"]

PARTIALS = 8  # partial sums in turn, as in nearstep_hw.updater.scan
_CHUNK = 1 << 16  # elements computed at a time, so that intermediate values fit the cache


def scan(gradients: NDArray[np.float32], *, lanes: int = 16) -> tuple[bool, float]:
    """Whether any gradient is infinite or NaN, and the sum of squares.

    Squares, and their sums within a beat of `lanes`, are binary32, added in pairs of neighbours,
    pairs of pairs, and so on; the sum of beat n is added to partial sum n mod 8 in binary64, and
    the partial sums are added in their order.

    Parameters
    ----------
    gradients : float32, of one dimension.
    lanes : a power of two.
    """
    if gradients.dtype != np.float32 or gradients.ndim != 1:
        raise TypeError(f"gradients must be float32 of one dimension, not {gradients.dtype}")
    found_inf = False
    partial = np.zeros(PARTIALS)
    whole = lanes * PARTIALS  # elements after which the turns begin again
    chunk = max(1, _CHUNK // whole) * whole
    with np.errstate(all="ignore"):
        for start in range(0, len(gradients), chunk):
            rows = _padded(gradients[start : start + chunk], lanes)
            found_inf |= not bool(np.isfinite(rows).all())
            terms = fp.mul32(rows, rows)
            while terms.shape[1] > 1:
                terms = fp.add32(terms[:, 0::2], terms[:, 1::2])
            # Adding +0 to a sum of squares changes nothing, so that the last row may be short.
            turns = _padded(terms[:, 0].astype(np.float64), PARTIALS)
            partial = np.cumsum(np.vstack([partial, turns]), axis=0)[-1]
        total = partial[0]
        for each in partial[1:]:
            total = total + each
    return found_inf, float(total)


def _padded(array: NDArray[Any], width: int) -> NDArray[Any]:
    rows = -(-len(array) // width)
    padded = np.zeros(rows * width, array.dtype)
    padded[: len(array)] = array
    return padded.reshape(rows, width)
