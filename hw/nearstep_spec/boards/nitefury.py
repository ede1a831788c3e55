"""NiteFury II: an Artix-7 200T on PCIe with DDR3. Project files only, no bitstream."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from nearstep_spec.smartssd.config import SmartssdConfig
from nearstep_spec.updater.config import ConfigError, UpdateKernelConfig

MEMORY_BYTES = 1 << 30
MEMORY_LANES = 4
"""A beat of the memory controller: 16 pins, both edges, four DDR3 clocks to one of its own."""

CHIP: Mapping[str, int] = MappingProxyType(
    {"lut": 134_600, "lut_memory": 46_200, "ff": 269_200, "dsp": 740, "bram36": 365}
)
"""Resources of an XC7A200T; `lut_memory` is a part of `lut`. Source: AMD DS180, table 5."""

UPDATER_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "lanes": MEMORY_LANES,
        "functional_units": 1,
        "block_bytes": 4096,
        "address_width": (MEMORY_BYTES - 1).bit_length(),
        "rules": ("adam",),
        "copy_out_formats": ("bf16",),
        "compression": ("fused",),
    }
)
"""Default update kernel: one unit updates a parameter a cycle, more than DDR3-800 on 16 pins
delivers: 28 bytes a parameter at 1.6 GB/s.
"""


def _card() -> SmartssdConfig:
    return SmartssdConfig(kernel=UpdateKernelConfig(**UPDATER_OPTIONS), memory_bytes=MEMORY_BYTES)


@dataclass(frozen=True, kw_only=True)
class NitefuryConfig:
    """Configuration of the project files: a card behind Gen2 x4.

    Parameters
    ----------
    card : the card; its beat and its memory are those of the board.

    Raises
    ------
    ConfigError : with the value and what is allowed.
    """

    card: SmartssdConfig = field(default_factory=_card)

    def __post_init__(self) -> None:
        if self.card.kernel.lanes != MEMORY_LANES:
            raise ConfigError(
                f"lanes must be {MEMORY_LANES}, a beat of the memory controller, "
                f"not {self.card.kernel.lanes!r}"
            )
        if self.card.memory_bytes != MEMORY_BYTES:
            raise ConfigError(
                f"memory_bytes must be {MEMORY_BYTES}, those of the board, "
                f"not {self.card.memory_bytes!r}"
            )
        width = (MEMORY_BYTES - 1).bit_length()
        if self.card.kernel.address_width != width:
            raise ConfigError(
                f"address_width must be {width}, that of the memory controller, "
                f"not {self.card.kernel.address_width!r}"
            )
