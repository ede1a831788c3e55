"""Sums of the rings of COARSE memory devices in C++, at memory speed: those of
`nearstep_sim.golden.coarse`, bit for bit; and exact sums, which are rounded once."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden.coarse import ring_order, short_part
from nearstep_sim.verilate.abi import load as load_functions
from nearstep_sim.verilate.build import compile_library
from nearstep_spec.coarse.config import MAX_ADDENDS
from nearstep_spec.coarse.registers import Wire

__all__ = ["exact_sum", "load", "ring_sum"]

F32 = NDArray[np.float32]
Array = F32 | NDArray[np.uint16]
DTYPES = (np.dtype(np.float32), np.dtype(np.uint16))

HALVES = ("fp16", "bf16")
"""Formats of 16 bits."""

LEAST_SHARE = 1 << 16
"""Least elements of a thread: starting a thread takes as long as summing a tenth of them."""


@cache
def _function(name: str) -> Callable[..., None]:
    """Compiled on first use, then taken from the build cache."""
    source = Path(__file__).with_name("ring.cpp")
    library = compile_library("ring", [source], cxxflags=["-pthread"])
    function: Callable[..., None] = getattr(load_functions(library, source), name)
    return function


def load() -> None:
    """Compile the functions of this module unless cached, to raise build errors before a run."""
    _function("ring_sum")


def exact_sum(
    tensors: Sequence[Array],
    outs: Sequence[Array],
    *,
    first: int = 0,
    wire: str = "fp32",
    divisor: int = 1,
    threads: int = 1,
    halves: str = "bf16",
) -> None:
    """Write a range of the exact sum of tensors, divided by `divisor`, rounded once to `wire`.

    Elements are rounded to `wire` before they are added. Infinities, NaN and zeros are those of any
    order of additions (IEEE 754-2019, 6): infinities of both signs give NaN, zeros of both signs or
    numbers that cancel +0. A NaN is the default quiet NaN.

    Parameters
    ----------
    tensors : 1 to 1024, 1-D contiguous float32 or uint16, of one length.
    outs, first, threads, halves : as of `ring_sum`.
    wire : `fp32`, `fp16` or `bf16`.
    divisor : from 1 to 1024; a power of two or not.

    Raises
    ------
    ValueError : the number of tensors, different arrays, a range outside of them, no such format.
    """
    if not 1 <= len(tensors) <= MAX_ADDENDS or not outs or not 1 <= divisor <= MAX_ADDENDS:
        raise ValueError(
            f"tensors must be 1 to {MAX_ADDENDS}, outs 1 or more and divisor 1 to {MAX_ADDENDS}, "
            f"not {len(tensors)}, {len(outs)} and {divisor}"
        )
    if wire.upper() not in Wire.__members__:
        raise ValueError(f"wire must be one of {', '.join(Wire.__members__).lower()}, not {wire!r}")
    _check(tensors, outs, first)
    length = outs[0].size
    _function("exact_sum")(
        _pointers(tensors),
        len(tensors),
        first,
        first + length,
        Wire[wire.upper()],
        divisor,
        _pointers(outs),
        len(outs),
        max(1, min(threads, length // LEAST_SHARE)),
        _formats([*tensors, *outs], halves),
    )


def ring_sum(
    tensors: Sequence[Array],
    outs: Sequence[Array],
    *,
    first: int = 0,
    entry_elements: int,
    reverse: bool = False,
    scale: np.float32 | None = None,
    threads: int = 1,
    halves: str = "bf16",
) -> None:
    """Write a range of the result of all devices of a ring after a sum or an average in fp32.

    Parameters
    ----------
    tensors : of each device, 1-D contiguous float32, or uint16 for patterns of 16 bits; of one
        length.
    outs : equal arrays for the elements from `first` on, each of which is written. An array may be
        that range of one of `tensors`; otherwise no memory is shared.
    first : element.
    entry_elements : elements of a part of a whole chunk.
    reverse : the ring runs from device 1 to device 0 to the last one, and so on.
    scale : factor of the sums; None for a sum alone.
    threads : most threads; results do not depend on the number.
    halves : `bf16` or `fp16`: format of arrays of uint16. Elements of `tensors` are widened before
        they are added, results are rounded to it once more.

    Raises
    ------
    ValueError : fewer than two tensors, different arrays, no such format, or a range outside of
        them.
    """
    if len(tensors) < 2 or not outs or entry_elements < 1:
        raise ValueError(
            f"tensors must be 2 or more, outs and entry_elements 1 or more, "
            f"not {len(tensors)}, {len(outs)} and {entry_elements}"
        )
    _check(tensors, outs, first)
    size, length = tensors[0].size, outs[0].size
    members = len(tensors)
    _function("ring_sum")(
        _pointers(ordered := [tensors[device] for device in ring_order(members, reverse)]),
        members,
        size,
        entry_elements,
        short_part(size, members, entry_elements),
        first,
        first + length,
        scale is not None,
        0.0 if scale is None else float(scale),
        _pointers(outs),
        len(outs),
        max(1, min(threads, length // LEAST_SHARE)),
        _formats([*ordered, *outs], halves),
    )


def _check(tensors: Sequence[Array], outs: Sequence[Array], first: int) -> None:
    """Raise ValueError unless the arrays are alike, and `outs` a range of `tensors`."""
    size, length = tensors[0].size, outs[0].size
    for given, want in ((tensors, size), (outs, length)):
        for each in given:
            if each.dtype not in DTYPES or each.shape != (want,) or not each.flags.c_contiguous:
                raise ValueError(
                    f"arrays must be contiguous float32 or uint16 of shape {(want,)}, "
                    f"not {each.dtype} of {each.shape}"
                )
    if not all(each.flags.writeable for each in outs):
        raise ValueError("outs must be writable, not read-only")
    if not 0 <= first <= first + length <= size:
        raise ValueError(f"elements must be of the first {size}, not {first} to {first + length}")


def _formats(arrays: Sequence[Array], halves: str) -> ctypes.Array[ctypes.c_int]:
    """Format of each array, as `ExactFormat` of golden/exact.hpp."""
    if halves not in HALVES:
        raise ValueError(f"halves must be one of {', '.join(HALVES)}, not {halves!r}")
    codes = {2: Wire[halves.upper()], 4: Wire.FP32}
    return (ctypes.c_int * len(arrays))(*(codes[each.itemsize] for each in arrays))


def _pointers(arrays: Sequence[Array]) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(arrays))(*map(_pointer, arrays))


def _pointer(array: Array) -> int:
    """Address of an array. `ndarray.ctypes` takes five times as long, and sums can be small."""
    if array.flags.writeable and array.size:
        return ctypes.addressof(ctypes.c_char.from_buffer(array))  # type: ignore[arg-type]
    return array.ctypes.data
