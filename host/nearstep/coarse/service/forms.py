"""Formats of elements in the memory of clients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPES: Mapping[str, np.dtype[Any]] = {
    "fp32": np.dtype(np.float32),
    "fp16": np.dtype(np.uint16),
    "bf16": np.dtype(np.uint16),
}
"""Dtype of each format; those of 16 bits are patterns."""


def widened(data: NDArray[Any], form: str) -> NDArray[np.float32]:
    """Return elements of a format as float32, exactly."""
    if form == "fp32":
        return data
    if form == "fp16":
        return data.view(np.float16).astype(np.float32)
    return (data.astype(np.uint32) << 16).view(np.float32)


def narrow(data: NDArray[np.float32], form: str, out: NDArray[np.uint16]) -> None:
    """Round canonical float32 to a format of 16 bits, to nearest even."""
    if form == "fp16":
        with np.errstate(over="ignore"):
            out.view(np.float16)[...] = data
        return
    words = data.view(np.uint32)
    out[...] = (words + (0x7FFF + (words >> 16 & 1))) >> 16
