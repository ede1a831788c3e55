"""How the gradients of a run lie in memory, and their factor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from nearstep.buffer import Buffer
from nearstep.errors import ArgumentError, DtypeError
from nearstep.kernel.checks import real
from nearstep_hw.axdimm.config import AdamKernelConfig

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {"fp32": np.dtype(np.float32), "fp16": np.dtype(np.float16), "bf16": np.dtype(np.uint16)}
)
"""dtype of a buffer of each format; numpy has no bfloat16."""

UNNAMED = ("fp32", "fp16")
"""Formats that a dtype stands for."""


@dataclass(frozen=True)
class Gradient:
    """What was said about the gradients of a run.

    Parameters
    ----------
    format: str | None
        None is that of the buffer's dtype.
    scale: float
    """

    format: str | None
    scale: float

    def check(self, config: AdamKernelConfig) -> None:
        """Make sure that the kernel has the format and can scale.

        Raises
        ------
        ArgumentError
        """
        formats = config.gradient_formats
        if self.format is not None and self.format not in formats:
            raise ArgumentError(
                f"gradient_format must be one that the kernel has ({', '.join(formats)}), "
                f"not {self.format!r}: name it in the device's gradient_formats="
            )
        scale = real("gradient_scale", self.scale)
        if not (math.isfinite(scale) and scale >= 0.0):
            raise ArgumentError(f"gradient_scale must be finite and not negative, not {scale}")
        if scale != 1.0 and not config.gradient_scale:
            raise ArgumentError(
                f"gradient_scale must be 1 with this kernel, not {scale}: "
                "open the device with gradient_scale=yes"
            )

    def format_of(self, buffer: Buffer, config: AdamKernelConfig) -> str:
        """The format of g.

        Raises
        ------
        DtypeError
        """
        formats = config.gradient_formats
        if self.format is not None:
            if buffer.dtype != DTYPES[self.format]:
                raise DtypeError("g", DTYPES[self.format], buffer.dtype)
            return self.format
        unnamed = [name for name in formats if name in UNNAMED]
        for name in unnamed:
            if buffer.dtype == DTYPES[name]:
                return name
        expected = [str(DTYPES[name]) for name in unnamed]
        if "bf16" in formats:
            expected.append("uint16 with gradient_format='bf16'")
        raise DtypeError("g", " or ".join(expected), buffer.dtype)
