"""Checks of buffers as the arrays of one run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

from nearstep.buffer import Buffer
from nearstep.device import Device
from nearstep.errors import (
    AlignmentError,
    ArgumentError,
    DtypeError,
    ForeignBufferError,
    OutOfBoundsError,
    OverlapError,
    ShapeError,
)
from nearstep.updater.formats import DTYPES, UNNAMED
from nearstep_spec.blockwise import SIGNED
from nearstep_spec.rule.rules import FP32
from nearstep_spec.updater.config import UpdateKernelConfig


def check_buffer(
    device: Device, config: UpdateKernelConfig, name: str, buffer: Buffer, action: str
) -> None:
    """Check that a buffer can be an array of a kernel of `device`, except for its elements.

    Raises
    ------
    DtypeError : the argument is no buffer.
    ForeignBufferError, AlignmentError, OutOfBoundsError
    """
    if not isinstance(buffer, Buffer):
        raise DtypeError(name, "Buffer", type(buffer).__name__)
    if buffer.device is not device:
        raise ForeignBufferError(name, device.url, buffer.device.url)
    buffer.check_usable(f"{action} on")
    beat, space = config.beat_bytes, 1 << config.address_width
    if buffer.address % beat:
        raise AlignmentError(name, buffer.address, beat)
    base, _ = device.backend.regions[device.channel_of(buffer)]
    begin = buffer.address - base
    if begin + buffer.nbytes > space:
        raise OutOfBoundsError(name, begin, begin + buffer.nbytes, space)


def check_size(
    config: UpdateKernelConfig, name: str, buffer: Buffer, size: int, form: str = FP32
) -> None:
    """Raise `ShapeError` unless a buffer has exactly as many elements of a format as p."""
    if form in SIGNED:
        expected = config.block_layout.nbytes(size)
        if buffer.size != expected:
            blocks = f"in blocks of {config.block_elements} with their scales"
            wanted = f"of {expected} bytes for {size} elements like p, {blocks}"
            raise ShapeError(name, wanted, f"of {buffer.size}")
    elif buffer.size != size:
        raise ShapeError(name, f"of {size} elements like p", f"of {buffer.size}")


def check_format(name: str, buffer: Buffer, form: str) -> None:
    """Raise `DtypeError` unless a buffer can hold elements of a format."""
    if buffer.dtype != DTYPES[form]:
        held = "bfloat16" if form == "bf16" else form
        of_form = "" if form in UNNAMED else f" that holds {held}"
        raise DtypeError(name, f"{DTYPES[form]}{of_form}", buffer.dtype)


def common_channel(buffers: Mapping[str, Buffer], channel_of: Callable[[Buffer], int]) -> int:
    """The channel of all buffers of a run.

    Raises
    ------
    OverlapError : two share bytes.
    ArgumentError : they are on several channels.
    """
    for (first, one), (second, other) in itertools.combinations(buffers.items(), 2):
        address = max(one.address, other.address)
        if address < min(one.address + one.nbytes, other.address + other.nbytes):
            raise OverlapError(first, second, address)
    numbers = {name: channel_of(buffer) for name, buffer in buffers.items()}
    if len(set(numbers.values())) > 1:
        raise ArgumentError(f"arrays of a run must lie on one channel, not on {numbers}")
    return next(iter(numbers.values()))
