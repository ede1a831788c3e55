"""Configuration of a SmartSSD card, and where its registers are: plain data."""

from dataclasses import dataclass
from functools import cache

from nearstep_spec.csr.model import BLOCK_BYTES, RegisterMap
from nearstep_spec.updater.config import ELEMENT_BYTES, AdamKernelConfig, ConfigError
from nearstep_spec.updater.registers import adam_kernel_map

UPDATER = AdamKernelConfig(
    rules=("adam", "sgd", "sgd_momentum", "adagrad"),
    gradient_formats=("fp32", "fp16", "bf16"),
    gradient_scale=True,
    copy_out_formats=("fp16", "bf16"),
    scan=True,
    compression=("fused", "scatter"),
    windows=8,
)
"""The update kernel of a card, unless it is given another: one general updater of four rules."""

PAGE_BYTES = 4096  # smallest part of a memory BAR
SUBGROUPS_HELD = 2  # one is updated while the other is moved


@dataclass(frozen=True, kw_only=True)
class SmartssdConfig:
    """Shape of a card: its update kernel, its DRAM, and the unit in which storage is moved.

    The host updates an optimizer's state in subgroups, two of which lie in the card's DRAM: while
    one is updated, the other goes to or comes from the drive. Within a subgroup the kernel loads
    chunks (its blocks), again two of each array.

    Parameters
    ----------
    kernel : the update kernel. A chunk is one of its blocks.
    memory_bytes : DRAM of the card; a power of two, because a BAR shows it to the host.
    subgroup_elements : elements of a subgroup, in whole chunks.

    Raises
    ------
    ConfigError : with the value and what is allowed.

    Ref: Smart-Infinity, sections IV-B and V-A.
    """

    kernel: AdamKernelConfig = UPDATER
    memory_bytes: int = 4 << 30
    subgroup_elements: int = 1 << 20

    def __post_init__(self) -> None:
        memory, space = self.memory_bytes, 1 << self.kernel.address_width
        if memory & (memory - 1) or not PAGE_BYTES <= memory <= space:
            raise ConfigError(
                f"memory_bytes must be a power of two from {PAGE_BYTES} to {space}, not {memory!r}"
            )
        chunk = self.chunk_elements
        if self.subgroup_elements < chunk or self.subgroup_elements % chunk:
            raise ConfigError(
                f"subgroup_elements must be a multiple of a chunk, {chunk}, "
                f"not {self.subgroup_elements!r}"
            )
        held = SUBGROUPS_HELD * self.subgroup_bytes
        if held > memory:
            raise ConfigError(
                f"memory_bytes must hold {SUBGROUPS_HELD} subgroups of {self.subgroup_elements} "
                f"elements, {held}, not {memory!r}"
            )

    @property
    def chunk_elements(self) -> int:
        """Elements of a chunk."""
        return self.kernel.block_elements

    @property
    def subgroup_bytes(self) -> int:
        """Bytes of every array of a subgroup together."""
        return ELEMENT_BYTES * len(self.kernel.arrays) * self.subgroup_elements

    @property
    def register_bytes(self) -> int:
        """Size of BAR0."""
        return BLOCK_BYTES * len(self.maps())

    def maps(self) -> dict[str, tuple[int, RegisterMap]]:
        """Register blocks: name to offset in BAR0 and register map."""
        return {"updater0": (0, _updater_map(self.kernel))}

    @staticmethod
    def largest_subgroup(kernel: AdamKernelConfig, memory_bytes: int) -> int:
        """The subgroup of a card of which nothing is said: `SmartssdConfig.subgroup_elements`, or
        the whole chunks that fit into the memory twice if that is less.
        """
        share = memory_bytes // (SUBGROUPS_HELD * ELEMENT_BYTES * len(kernel.arrays))
        chunks = share // kernel.block_elements * kernel.block_elements
        return min(SmartssdConfig.subgroup_elements, chunks)


@cache
def _updater_map(kernel: AdamKernelConfig) -> RegisterMap:
    return adam_kernel_map(kernel)
