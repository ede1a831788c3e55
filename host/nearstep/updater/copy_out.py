"""The copy of the parameters that a run writes beside them."""

from __future__ import annotations

from dataclasses import dataclass

from nearstep.buffer import Buffer
from nearstep.errors import ArgumentError
from nearstep.updater.formats import format_of
from nearstep_spec.updater.config import UpdateKernelConfig


@dataclass(frozen=True)
class CopyOut:
    """What was said about the copy of a run.

    Parameters
    ----------
    buffer : where it goes; None is no copy.
    format : None is that of the buffer's dtype.
    """

    buffer: Buffer | None = None
    format: str | None = None

    def check(self, config: UpdateKernelConfig) -> None:
        """Make sure that the kernel can make it.

        Raises
        ------
        ArgumentError : the kernel makes no copies, or none of this format; or there is a format
            without a copy.
        """
        formats = config.copy_out_formats
        if self.buffer is None:
            if self.format is not None:
                raise ArgumentError(f"copy_out_format={self.format!r} needs a copy_out")
            return
        if not formats:
            raise ArgumentError(
                "copy_out must be None with this kernel: "
                "name a format in the device's copy_out_formats="
            )
        if self.format is not None and self.format not in formats:
            raise ArgumentError(
                f"copy_out_format must be one that the kernel has ({', '.join(formats)}), "
                f"not {self.format!r}: name it in the device's copy_out_formats="
            )

    def format_of(self, buffer: Buffer, config: UpdateKernelConfig) -> str:
        """The format of the copy."""
        return format_of(
            buffer,
            self.format,
            config.copy_out_formats,
            name="copy_out",
            argument="copy_out_format",
        )
