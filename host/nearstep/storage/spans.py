"""The bytes of a tensor that a transfer moves."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import ArgumentError, OutOfBoundsError
from nearstep.scalars import is_whole
from nearstep.storage.extent_jobs import Flat
from nearstep.storage.extents import Table, Tensor


def flat_bytes(what: str, data: Any, *, writes: bool = False) -> Flat:
    """The bytes of a contiguous array or buffer.

    Raises
    ------
    ArgumentError : there is no such array, or it must be written and cannot be.
    """
    array: NDArray[Any]
    if isinstance(data, np.ndarray):
        array = data
    else:
        try:
            array = np.frombuffer(data, np.uint8)
        except (TypeError, ValueError, BufferError) as error:
            raise ArgumentError(f"{what} must be an array or a buffer: {error}") from None
    if not array.flags.c_contiguous:
        raise ArgumentError(f"{what} must be contiguous, not strided {array.strides}")
    if array.dtype.hasobject:
        raise ArgumentError(f"{what} must have no objects, not {array.dtype}")
    if writes and not array.flags.writeable:
        raise ArgumentError(f"{what} must be writeable")
    flat: Flat = array.reshape(-1).view(np.uint8)
    return flat


def check_span(tensor: Tensor, offset: int, nbytes: int) -> None:
    """Raise `OutOfBoundsError` unless a tensor has these bytes."""
    if not is_whole(offset):
        raise ArgumentError(f"offset must be a whole number, not {offset!r}")
    if not 0 <= offset <= offset + nbytes <= tensor.nbytes:
        raise OutOfBoundsError(f"bytes of {tensor.name!r}", offset, offset + nbytes, tensor.nbytes)


def widened(table: Table, first: int, last: int) -> tuple[int, int]:
    """First and last block of the extents that have any of these blocks."""
    numbers = table.covering(first, last)
    return int(table.starts[numbers.start]), int(table.starts[numbers.stop])
