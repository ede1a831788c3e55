"""Options of every emulated device with an update kernel, as they stand in a device name.

What an option means, and what it may be, stands beside its type; ``nearstep devices`` and the
errors say it from there.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from nearstep.backends.options import Option
from nearstep_spec.rule.rules import RULES
from nearstep_spec.updater.config import (
    COMPRESSIONS,
    COPY_OUT_FORMATS,
    GRADIENT_FORMATS,
    LANES,
    AdamKernelConfig,
)

BlockBytes = Annotated[
    int,
    Option(
        meaning="bytes loaded from one array before the next has its turn",
        allowed="a power of two from eight beats (512 with 16 lanes) to 1MiB",
    ),
]
Rules = Annotated[
    str, Option(meaning="update rules of the kernel", choices=("adam", *RULES), several=True)
]
GradientFormats = Annotated[
    str,
    Option(
        meaning="formats that gradients may have",
        choices=GRADIENT_FORMATS,
        several=True,
        allowed="fp32 among them",
    ),
]
GradientScale = Annotated[
    bool, Option(meaning="whether the kernel can multiply gradients by a factor")
]
CopyOutFormats = Annotated[
    str,
    Option(
        meaning="formats of a copy of the updated parameters",
        choices=COPY_OUT_FORMATS,
        several=True,
        unset="none",
    ),
]
Scan = Annotated[
    bool, Option(meaning="whether the kernel can search gradients for infinities, and sum them")
]
Compression = Annotated[
    str,
    Option(
        meaning="forms of gradients as pairs of index and value; needs two lanes",
        choices=COMPRESSIONS,
        several=True,
        unset="none",
    ),
]
Engine = Annotated[
    Literal["cpp", "numpy"],
    Option(meaning="arithmetic: cpp is compiled on first use, numpy is slower"),
]


@dataclass(frozen=True, kw_only=True)
class KernelOptions:
    """Options that every emulated device with an update kernel has; families name its block."""

    lanes: Annotated[
        int,
        Option(meaning="fp32 elements of a memory beat", choices=LANES, allowed="16 on DDR4 DIMMs"),
    ] = 16
    functional_units: Annotated[
        int | None,
        Option(
            meaning="update units; a beat takes lanes / units cycles",
            allowed="a divisor of lanes",
            unset="lanes",
        ),
    ] = None
    order: Annotated[
        Literal["default", "paper"],
        Option(meaning="of Adam's arithmetic: torch's bits, or Algorithm 1 of the AXDIMM paper"),
    ] = "default"
    rules: Rules = "adam"
    gradient_formats: GradientFormats = "fp32"
    gradient_scale: GradientScale = False
    copy_out_formats: CopyOutFormats = ""
    scan: Scan = False
    compression: Compression = ""

    def kernel_of(self, block_bytes: int) -> AdamKernelConfig:
        """Configuration of a kernel with this block, and a window for each array of any run.

        Raises
        ------
        nearstep_spec.updater.config.ConfigError
        """
        config = AdamKernelConfig(
            lanes=self.lanes,
            functional_units=self.functional_units,
            block_bytes=block_bytes,
            order=self.order,
            rules=tuple(self.rules.split(",")),
            gradient_formats=tuple(self.gradient_formats.split(",")),
            gradient_scale=self.gradient_scale,
            copy_out_formats=names(self.copy_out_formats),
            scan=self.scan,
            compression=names(self.compression),
        )
        arrays = len(config.arrays) + bool(config.compression) + bool(config.copy_out_formats)
        return replace(config, windows=max(config.windows, arrays))


def names(text: str) -> tuple[str, ...]:
    """Names with commas between them."""
    return tuple(text.split(",")) if text else ()
