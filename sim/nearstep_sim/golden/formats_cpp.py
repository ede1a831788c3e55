"""Conversions between binary32 and formats of 16 bits, in C++: those of
`nearstep_sim.golden.fp`, bit for bit, at memory speed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.verilate.abi import load as load_functions
from nearstep_sim.verilate.build import compile_library
from nearstep_spec.fp import BF16, FP16, FpFormat

__all__ = ["load", "narrow32", "widen32"]

_NAMES = {FP16: "fp16", BF16: "bf16"}


@cache
def _function(name: str) -> Callable[..., None]:
    """Compiled on first use, then taken from the build cache."""
    source = Path(__file__).with_name("formats.cpp")
    function: Callable[..., None] = getattr(
        load_functions(compile_library("formats", [source]), source), name
    )
    return function


def load() -> None:
    """Compile the functions of this module unless cached, to raise build errors before a run."""
    _function("widen_bf16")


def widen32(a: NDArray[np.uint16], source: FpFormat) -> NDArray[np.float32]:
    """Patterns of FP16 or BF16 as float32, exactly; a NaN is the default quiet NaN."""
    if a.dtype != np.uint16 or source not in _NAMES:
        raise TypeError(f"operands must be uint16 of FP16 or BF16, not {a.dtype} of {source}")
    given, made = np.ascontiguousarray(a), np.empty(a.shape, np.float32)
    _function(f"widen_{_NAMES[source]}")(given.ctypes.data, made.ctypes.data, given.size)
    return made


def narrow32(a: NDArray[np.float32], target: FpFormat) -> NDArray[np.uint16]:
    """float32 as patterns of FP16 or BF16, rounded once; a NaN is the default quiet NaN."""
    if a.dtype != np.float32 or target not in _NAMES:
        raise TypeError(f"operands must be float32, for FP16 or BF16, not {a.dtype} for {target}")
    given, made = np.ascontiguousarray(a), np.empty(a.shape, np.uint16)
    _function(f"narrow_{_NAMES[target]}")(given.ctypes.data, made.ctypes.data, given.size)
    return made
