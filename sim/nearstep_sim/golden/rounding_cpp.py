"""Stochastic rounding to bfloat16 in C++: that of `nearstep_sim.golden.rounding`, bit for bit, at
memory speed."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden.rounding import Draw
from nearstep_sim.verilate.abi import load as load_functions
from nearstep_sim.verilate.build import compile_library

__all__ = ["load", "round_stochastically"]


@cache
def load() -> Callable[..., None]:
    """Compile the functions of this module unless cached, to raise build errors before a run."""
    source = Path(__file__).with_name("rounding.cpp")
    library = load_functions(compile_library("rounding", [source]), source)
    function: Callable[..., None] = library.narrow_bf16_stochastically
    return function


def round_stochastically(a: NDArray[np.float32], draw: Draw) -> NDArray[np.uint16]:
    """float32, of shape (n,), as patterns of BF16, rounded stochastically."""
    if a.dtype != np.float32:
        raise TypeError(f"operands must be float32, not {a.dtype}")
    given, made = np.ascontiguousarray(a), np.empty(a.shape, np.uint16)
    load()(
        given.ctypes.data,
        made.ctypes.data,
        given.size,
        draw.seed,
        draw.step,
        draw.stream,
        draw.index,
        draw.within,
        draw.block,
        draw.skip,
    )
    return made
