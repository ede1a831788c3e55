"""Configuration of a computational SSD, and where its registers are: plain data."""

from dataclasses import dataclass, field

from nearstep_hw.axdimm.config import COMPRESSIONS, COPY_OUT_FORMATS, AdamKernelConfig, ConfigError
from nearstep_hw.axdimm.registers import adam_kernel_map
from nearstep_hw.csr.model import RegisterMap


def _kernel() -> AdamKernelConfig:
    return AdamKernelConfig(
        copy_out_formats=COPY_OUT_FORMATS, scan=True, compression=COMPRESSIONS, windows=8
    )


@dataclass(frozen=True, kw_only=True)
class SmartssdConfig:
    """The update kernel of a card, and its memory.

    Parameters
    ----------
    kernel : beside the memory.
    memory_bytes : of the card's DRAM.
    subgroup_elements : parameters that are updated at a time.

    Raises
    ------
    ConfigError : with the value and what is allowed.
    """

    kernel: AdamKernelConfig = field(default_factory=_kernel)
    memory_bytes: int = 4 << 30
    subgroup_elements: int = 1 << 20

    def __post_init__(self) -> None:
        space = 1 << self.kernel.address_width
        if not 0 < self.memory_bytes <= space or self.memory_bytes % 64:
            raise ConfigError(
                f"memory_bytes must be a multiple of 64 up to {space}, not {self.memory_bytes!r}"
            )

    def maps(self) -> dict[str, tuple[int, RegisterMap]]:
        """Register blocks: name to address and register map."""
        return {"updater0": (0, adam_kernel_map(self.kernel))}
