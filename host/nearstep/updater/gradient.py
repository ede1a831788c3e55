"""What is said about the gradients of a run: their format and their factor."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nearstep.buffer import Buffer
from nearstep.errors import ArgumentError
from nearstep.updater.checks import real
from nearstep.updater.formats import format_of
from nearstep_spec.updater.config import UpdateKernelConfig


@dataclass(frozen=True)
class Gradient:
    """What was said about the gradients of a run.

    Parameters
    ----------
    format : None is that of the buffer's dtype.
    """

    format: str | None
    scale: float = 1.0

    def check(self, config: UpdateKernelConfig) -> None:
        """Make sure that the kernel has the format and can scale.

        Raises
        ------
        ArgumentError : it does not; or the scale is no finite number.
        """
        formats = config.gradient_formats
        if self.format is not None and self.format not in formats:
            raise ArgumentError(
                f"gradient_format must be one that the kernel has ({', '.join(formats)}), "
                f"not {self.format!r}: name it in the device's gradient_formats="
            )
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
        return format_of(
            buffer, self.format, config.gradient_formats, name="g", argument="gradient_format"
        )
