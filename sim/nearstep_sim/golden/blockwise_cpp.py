"""State in 8 bits in C++: conversions of `nearstep_sim.golden.blockwise`, bit for bit, at memory
speed."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden.blockwise import (
    GROUP,
    SMALLEST_SCALE,
    Blockwise,
    check_values,
    codes_of,
    dynamic_map,
)
from nearstep_sim.verilate.abi import load as load_functions
from nearstep_sim.verilate.build import compile_library

__all__ = ["dequantize", "load", "quantize", "steps"]

_LOW_BITS = 16


@cache
def load() -> ctypes.CDLL:
    """Compile the functions of this module unless cached, to raise build errors before a run."""
    source = Path(__file__).with_name("blockwise.cpp")
    return load_functions(compile_library("blockwise", [source]), source)


@cache
def steps(signed: bool) -> NDArray[np.uint32]:
    """Codes of quotients by their upper 16 bits, among which there is one step at most.

    A word has the code of the pattern whose lower 16 bits are 0, the code of the one where they are
    all set (a byte each, from the top), and the least lower 16 bits that have the latter; 0 if
    there is no step.
    """

    def codes(low: NDArray[np.uint32] | np.uint32) -> NDArray[np.uint8]:
        return codes_of((upper | low).view(np.float32), signed=signed)

    upper = np.arange(1 << _LOW_BITS, dtype=np.uint32) << np.uint32(_LOW_BITS)
    last = (1 << _LOW_BITS) - 1
    before, after = codes(np.uint32(0)), codes(np.uint32(last))
    least, most = np.zeros_like(upper), np.full_like(upper, last)  # `most` is not below the step
    for _ in range(_LOW_BITS):
        middle = (least + most) // np.uint32(2)
        behind = codes(middle) == after
        least, most = np.where(behind, least, middle + np.uint32(1)), np.where(behind, middle, most)
    return (before.astype(np.uint32) << np.uint32(24)) | (
        after.astype(np.uint32) << np.uint32(16)
    ) | most  # fmt: skip


def quantize(values: NDArray[np.float32], *, signed: bool) -> Blockwise:
    """Quantize float32 of shape (n,) to 8 bits."""
    check_values(values)
    given = np.ascontiguousarray(values)
    made = Blockwise(np.empty(given.size, np.uint8), np.empty(-(-given.size // GROUP), np.float32))
    load().quantize_blockwise(
        given.ctypes.data,
        made.codes.ctypes.data,
        made.scales.ctypes.data,
        given.size,
        int(SMALLEST_SCALE.view(np.uint32)),
        steps(signed).ctypes.data,
    )
    return made


def dequantize(given: Blockwise, *, signed: bool) -> NDArray[np.float32]:
    """Convert 8 bits to float32 of shape (n,)."""
    codes, scales = map(np.ascontiguousarray, given)
    if codes.dtype != np.uint8 or scales.dtype != np.float32:
        raise TypeError(f"must be uint8 and float32, not {codes.dtype} and {scales.dtype}")
    if scales.size != -(-codes.size // GROUP):
        raise ValueError(
            f"{codes.size} codes have {-(-codes.size // GROUP)} scales, not {scales.size}"
        )
    made = np.empty(codes.size, np.float32)
    load().dequantize_blockwise(
        codes.ctypes.data,
        scales.ctypes.data,
        made.ctypes.data,
        made.size,
        dynamic_map(signed).ctypes.data,
    )
    return made
