"""Number formats of the arrays of a run, and the buffers that hold them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from nearstep.buffer import Buffer
from nearstep.errors import ArgumentError, DtypeError
from nearstep.updater.checks import real
from nearstep_spec.blockwise import SIGNED
from nearstep_spec.updater.config import UpdateKernelConfig

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        "fp32": np.dtype(np.float32),
        "fp16": np.dtype(np.float16),
        "bf16": np.dtype(np.uint16),
        **dict.fromkeys(SIGNED, np.dtype(np.uint8)),
    }
)
"""Dtype of a buffer of each format: bfloat16 is held as uint16, formats in 8 bits as bytes with
their scales."""

UNNAMED = ("fp32", "fp16")
"""Formats that follow from a dtype."""


def format_of(
    buffer: Buffer, named: str | None, formats: Sequence[str], *, name: str, argument: str
) -> str:
    """The format of a buffer.

    Parameters
    ----------
    named : the given format, one of `formats`; None is that of its dtype.
    formats : that it may have.
    name, argument : names of the buffer, and of the argument for its format, for messages.

    Raises
    ------
    DtypeError
    """
    if named is not None:
        if buffer.dtype != DTYPES[named]:
            raise DtypeError(name, DTYPES[named], buffer.dtype)
        return named
    unnamed = [each for each in formats if each in UNNAMED]
    for each in unnamed:
        if buffer.dtype == DTYPES[each]:
            return each
    expected = [str(DTYPES[each]) for each in unnamed]
    if "bf16" in formats:
        expected.append(f"uint16 with {argument}='bf16'")
    raise DtypeError(name, " or ".join(expected), buffer.dtype)


def check_named(argument: str, named: str | None, formats: Sequence[str]) -> None:
    """Raise `ArgumentError` unless the kernel has the format in an argument."""
    if named is not None and named not in formats:
        raise ArgumentError(
            f"{argument} must be a format of the kernel ({', '.join(formats)}), "
            f"not {named!r}: name it in the device's {argument}s="
        )


@dataclass(frozen=True)
class Gradient:
    """Format and scale of the gradients of a run.

    Parameters
    ----------
    format : None is that of the buffer's dtype.
    """

    format: str | None
    scale: float = 1.0

    def check(self, config: UpdateKernelConfig) -> None:
        """Check that the kernel has the format and can scale.

        Raises
        ------
        ArgumentError : the kernel does not support them, or the scale is not finite.
        """
        check_named("gradient_format", self.format, config.gradient_formats)
        scale = real("gradient_scale", self.scale)
        if not math.isfinite(scale):
            raise ArgumentError(f"gradient_scale must be finite, not {scale}")
        if scale != 1.0 and not config.gradient_scale:
            raise ArgumentError(
                f"gradient_scale must be 1 with this kernel, not {scale}: "
                "open the device with gradient_scale=yes"
            )

    def format_of(self, buffer: Buffer, config: UpdateKernelConfig) -> str:
        """The format of g, or of the values of its pairs."""
        formats = config.gradient_formats
        return format_of(buffer, self.format, formats, name="g", argument="gradient_format")


@dataclass(frozen=True)
class CopyOut:
    """The copy of the parameters that a run writes.

    Parameters
    ----------
    buffer : of the copy, or None.
    format : None is that of the buffer's dtype.
    """

    buffer: Buffer | None = None
    format: str | None = None

    def check(self, config: UpdateKernelConfig) -> None:
        """Check that the kernel can make the copy.

        Raises
        ------
        ArgumentError : the kernel makes no copies, or none of this format; or a format is given
            without a copy.
        """
        if self.buffer is None:
            if self.format is not None:
                raise ArgumentError(f"copy_out_format={self.format!r} needs a copy_out")
            return
        if not config.copy_out_formats:
            raise ArgumentError(
                "copy_out must be None with this kernel: "
                "name a format in the device's copy_out_formats="
            )
        check_named("copy_out_format", self.format, config.copy_out_formats)

    def format_of(self, buffer: Buffer, config: UpdateKernelConfig) -> str:
        """The format of the copy."""
        formats = config.copy_out_formats
        argument = "copy_out_format"
        return format_of(buffer, self.format, formats, name="copy_out", argument=argument)
