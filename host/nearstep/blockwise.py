"""Arrays in 8 bits on the host: codes of a dynamic map, and a scale for each 256 elements.

A device with `state_format=dynamic8` in its name keeps states in this format::

    buffer = device.alloc_blockwise(values.size)
    layout = device.config.block_layout
    buffer.write(blockwise.pack(blockwise.quantize(values, signed=True), layout))
    values = blockwise.dequantize(blockwise.unpack(buffer.read(), layout), signed=True)

`nearstep_spec.blockwise` defines codes, scales and their layout in memory. Moments that are means
or sums of squares have the map without negative entries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import DtypeError, ShapeError
from nearstep_spec import blockwise as spec
from nearstep_spec.blockwise import GROUP, BlockLayout

__all__ = [
    "GROUP",
    "BlockLayout",
    "Blockwise",
    "dequantize",
    "groups",
    "pack",
    "quantize",
    "unpack",
]

_QUIET_NAN = np.uint32(0x7FC0_0000).view(np.float32)
_SMALLEST = np.uint32(spec.SMALLEST_SCALE).view(np.float32)

_AT_ONCE = 1 << 18
"""Elements converted at a time: a multiple of `GROUP`."""

Parts = tuple[NDArray[np.uint8], NDArray[np.uint8]]
"""Bytes of the whole blocks, of shape (blocks, bytes), and of a last block that is short."""


class Blockwise(NamedTuple):
    """An array in 8 bits.

    Attributes
    ----------
    codes : uint8, of shape (n,).
    scales : float32, of shape (groups(n),).
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]


def groups(count: int) -> int:
    """Scales of an array of `count` elements."""
    return -(-count // GROUP)


def quantize(values: NDArray[np.float32], *, signed: bool) -> Blockwise:
    """Quantize float32 values, of shape (n,), to 8 bits.

    A scale is the largest magnitude of a group, at least 1e-12, or the default NaN if the group has
    a NaN. A code is that of the map's entry nearest to value / scale, on a tie the upper one; 0 if
    the quotient is NaN.

    Parameters
    ----------
    signed : whether the map has negative entries; the other map has 0 for negative values.

    Raises
    ------
    DtypeError, ShapeError
    """
    _check("values", values, np.float32)
    whole = values.size // GROUP * GROUP
    scales = np.empty(groups(values.size), np.float32)
    codes = np.empty(values.size, np.uint8)
    with np.errstate(all="ignore"):
        np.abs(values[:whole]).reshape(-1, GROUP).max(1, out=scales[: whole // GROUP])
        if whole < values.size:
            scales[-1] = np.abs(values[whole:]).max()
        scales = np.where(np.isnan(scales), _QUIET_NAN, np.maximum(scales, _SMALLEST))
        _by_group(values, scales, np.divide, lambda quotients: _codes(quotients, signed), codes)
    return Blockwise(codes, scales)


def dequantize(given: Blockwise, *, signed: bool) -> NDArray[np.float32]:
    """Return float32 values, of shape (n,): entries of the map times the scales.

    Every NaN is the default one.

    Raises
    ------
    DtypeError, ShapeError
    """
    _check_blockwise(given)
    out = np.empty(given.codes.size, np.float32)
    with np.errstate(all="ignore"):
        entries = _entries(signed)[given.codes]
        _by_group(entries, given.scales, np.multiply, lambda products: products, out)
    out[np.isnan(out)] = _QUIET_NAN
    return out


def pack(given: Blockwise, layout: BlockLayout) -> NDArray[np.uint8]:
    """The bytes of an array in memory, `layout.nbytes(n)` of them; padding of scales is 0.

    Raises
    ------
    DtypeError, ShapeError
    """
    _check_blockwise(given)
    count = given.codes.size
    out = np.zeros(layout.nbytes(count), np.uint8)
    scales, codes = _views(out, count, layout)
    bytes_of_scales = np.ascontiguousarray(given.scales).view(np.uint8)
    for (to, each), source in ((scales, bytes_of_scales), (codes, given.codes)):
        whole = len(to) * to.shape[1]
        to[:] = source[:whole].reshape(to.shape)
        each[:] = source[whole:]
    return out


def unpack(data: NDArray[np.uint8], layout: BlockLayout) -> Blockwise:
    """The inverse of `pack`.

    Raises
    ------
    DtypeError
    ShapeError : no array has this number of bytes.
    """
    _check("data", data, np.uint8)
    try:
        count = layout.count(data.size)
    except ValueError as error:
        raise ShapeError("data", "that of an array in 8 bits", f"{data.shape}: {error}") from None
    (scales, last_scales), (codes, last_codes) = _views(np.ascontiguousarray(data), count, layout)
    joined = np.concatenate([scales.reshape(-1), last_scales])
    return Blockwise(np.concatenate([codes.reshape(-1), last_codes]), joined.view(np.float32))


def _views(data: NDArray[np.uint8], count: int, layout: BlockLayout) -> tuple[Parts, Parts]:
    """Views of the scales and the codes in the bytes of an array."""
    whole, rest = divmod(count, layout.elements)
    size = layout.elements + layout.scale_bytes
    blocks, last = data[: whole * size].reshape(whole, size), data[whole * size :]
    scales = blocks[:, : 4 * (layout.elements // GROUP)], last[: 4 * groups(rest)]
    return scales, (blocks[:, layout.scale_bytes :], last[layout.scale_bytes :])


def _by_group(
    values: NDArray[np.float32],
    scales: NDArray[np.float32],
    operation: Callable[..., NDArray[np.float32]],
    finish: Callable[[NDArray[np.float32]], NDArray[Any]],
    out: NDArray[Any],
) -> None:
    """Compute `out = finish(operation(value, scale of its group))`."""
    for start in range(0, values.size, _AT_ONCE):
        part = values[start : start + _AT_ONCE]
        own = np.repeat(scales[start // GROUP : groups(start + part.size)], GROUP)[: part.size]
        out[start : start + _AT_ONCE] = finish(operation(part, own))


def _codes(quotients: NDArray[np.float32], signed: bool) -> NDArray[np.intp]:
    found = np.searchsorted(_thresholds(signed), quotients, side="right")
    found[np.isnan(quotients)] = 0
    return found


@cache
def _thresholds(signed: bool) -> NDArray[np.float32]:
    return np.array(spec.thresholds(signed=signed), np.uint32).view(np.float32)


@cache
def _entries(signed: bool) -> NDArray[np.float32]:
    return np.array(spec.dynamic_map(signed=signed), np.uint32).view(np.float32)


def _check_blockwise(given: Blockwise) -> None:
    if not isinstance(given, Blockwise):
        raise DtypeError("given", "Blockwise", type(given).__name__)
    _check("codes", given.codes, np.uint8)
    _check("scales", given.scales, np.float32)
    expected = groups(given.codes.size)
    if given.scales.size != expected:
        what = f"scales of {given.codes.size} codes"
        raise ShapeError(what, (expected,), given.scales.shape)


def _check(name: str, array: object, dtype: type[np.generic]) -> None:
    kind = np.dtype(dtype)
    if not isinstance(array, np.ndarray):
        raise DtypeError(name, f"array of {kind}", type(array).__name__)
    if array.dtype != kind:
        raise DtypeError(name, kind, array.dtype)
    if array.ndim != 1:
        raise ShapeError(name, "one-dimensional", array.shape)
