"""Whether buffers can be the arrays of one run."""

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
from nearstep.updater.formats import DTYPES
from nearstep_spec.updater.config import AdamKernelConfig


def check_buffer(
    device: Device, config: AdamKernelConfig, name: str, buffer: Buffer, action: str
) -> None:
    """Make sure that a buffer can be an array of a kernel of `device`, whatever its elements.

    Raises
    ------
    DtypeError : it is no buffer.
    ForeignBufferError, FreedBufferError, ClosedDeviceError
    AlignmentError, OutOfBoundsError
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


def check_size(name: str, buffer: Buffer, size: int) -> None:
    """Raise `ShapeError` unless a buffer is as large as p."""
    if buffer.size != size:
        raise ShapeError(name, f"of {size} elements like p", f"of {buffer.size}")


def check_format(name: str, buffer: Buffer, form: str) -> None:
    """Raise `DtypeError` unless a buffer can hold elements of a format."""
    if buffer.dtype != DTYPES[form]:
        of_form = " that holds bfloat16" if form == "bf16" else ""
        raise DtypeError(name, f"{DTYPES[form]}{of_form}", buffer.dtype)


def common_channel(buffers: Mapping[str, Buffer], channel_of: Callable[[Buffer], int]) -> int:
    """The channel that all of them lie on.

    Raises
    ------
    OverlapError : two share bytes.
    ArgumentError : they lie on several channels.
    """
    for (first, one), (second, other) in itertools.combinations(buffers.items(), 2):
        address = max(one.address, other.address)
        if address < min(one.address + one.nbytes, other.address + other.nbytes):
            raise OverlapError(first, second, address)
    numbers = {name: channel_of(buffer) for name, buffer in buffers.items()}
    if len(set(numbers.values())) > 1:
        raise ArgumentError(f"arrays of a run must lie on one channel, not on {numbers}")
    return next(iter(numbers.values()))
