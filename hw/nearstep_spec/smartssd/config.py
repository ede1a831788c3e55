"""Configuration of a SmartSSD card, and addresses of its registers: plain data."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType
from typing import Annotated, Any, Literal

from nearstep_spec.codec import Nested, Option
from nearstep_spec.csr.model import BLOCK_BYTES, RegisterMap
from nearstep_spec.rule.rules import BY_RULE
from nearstep_spec.updater.config import ELEMENT_BYTES, LANES, ConfigError, UpdateKernelConfig
from nearstep_spec.updater.registers import adam_kernel_map

UPDATER_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "rules": ("adam", "sgd", "sgd_momentum", "adagrad"),
        "gradient_formats": ("fp32", "fp16", "bf16"),
        "gradient_scale": True,
        "copy_out_formats": ("fp16", "bf16"),
        "scan": True,
        "compression": ("fused", "scatter"),
        "windows": 8,
    }
)
UPDATER = UpdateKernelConfig(**UPDATER_OPTIONS)
"""Default update kernel of a card: one general updater of four rules."""

PAGE_BYTES = 4096  # smallest part of a memory BAR
SUBGROUPS_HELD = 2  # one is updated while the other is transferred
LARGEST_SUBGROUP = 1 << 20  # default number of elements


@dataclass(frozen=True, kw_only=True)
class SmartssdConfig:
    """Shape of a card: its update kernel, its DRAM, and the unit of transfers of storage.

    The host updates an optimizer's state in subgroups, at least two of which fit the card's DRAM:
    while one is updated, others are written to or read from the drive. Within a subgroup the kernel
    loads chunks (its blocks), two of each array.

    Parameters
    ----------
    kernel : the update kernel. A chunk is one of its blocks.
    memory_bytes : DRAM of the card; a power of two, because it is a BAR.
    subgroup_elements : elements of a subgroup, in whole chunks; None: 2**20, or the whole chunks
        that fit into the memory twice if those are fewer; with arrays aligned to pages, a copy of
        the parameters and indices of pairs beside them, if at least a chunk then fits.

    Raises
    ------
    ConfigError : with the value and what is allowed.

    Ref: Smart-Infinity, sections IV-B and V-A.
    """

    kernel: Annotated[
        UpdateKernelConfig, Nested(rename={"block_bytes": "chunk_bytes"}, defaults=UPDATER_OPTIONS)
    ] = UPDATER
    memory_bytes: Annotated[
        int,
        Option(
            meaning="DRAM of the card; host memory is allocated on first use",
            allowed="a power of two from 4096 to 16GiB that holds two subgroups",
        ),
    ] = 4 << 30
    subgroup_elements: Annotated[
        int | None,
        Option(
            meaning="elements that are updated while as many others are transferred",
            allowed="whole chunks",
            unset="2**20, or what fits",
        ),
    ] = None

    def __post_init__(self) -> None:
        memory, space = self.memory_bytes, 1 << self.kernel.address_width
        if memory & (memory - 1) or not PAGE_BYTES <= memory <= space:
            raise ConfigError(
                f"memory_bytes must be a power of two from {PAGE_BYTES} to {space}, not {memory!r}"
            )
        chunk, elements = self.chunk_elements, self.subgroup_elements
        if elements is None:
            elements = min(LARGEST_SUBGROUP, self._share(chunk))
            if elements == 0:
                least = SUBGROUPS_HELD * len(self.kernel.arrays) * self.kernel.block_bytes
                raise ConfigError(
                    f"memory_bytes must hold {SUBGROUPS_HELD} chunks of {self.kernel.block_bytes} "
                    f"bytes of each of {len(self.kernel.arrays)} arrays, {least}, not {memory}"
                )
            object.__setattr__(self, "subgroup_elements", elements)
        if elements < chunk or elements % chunk:
            raise ConfigError(
                f"subgroup_elements must be a multiple of a chunk, {chunk}, not {elements!r}"
            )
        held = SUBGROUPS_HELD * self.subgroup_bytes
        if held > memory:
            raise ConfigError(
                f"memory_bytes must hold {SUBGROUPS_HELD} subgroups of {elements} "
                f"elements, {held}, not {memory!r}"
            )

    def _share(self, chunk: int) -> int:
        """Elements of the largest subgroup that has room in memory, in whole chunks."""
        arrays, memory = len(self.kernel.arrays), self.memory_bytes
        beside = bool(self.kernel.copy_out_formats) + bool(self.kernel.compression)
        for held, between in ((arrays + beside, PAGE_BYTES), (arrays, 0)):
            share = (memory // (SUBGROUPS_HELD * held) - between) // ELEMENT_BYTES
            if share >= chunk:
                return share // chunk * chunk
        return 0

    @property
    def chunk_elements(self) -> int:
        """Elements of a chunk."""
        return self.kernel.block_elements

    @property
    def subgroup(self) -> int:
        """Elements of a subgroup."""
        assert self.subgroup_elements is not None  # `__post_init__`
        return self.subgroup_elements

    @property
    def subgroup_bytes(self) -> int:
        """Bytes of every array of a subgroup together."""
        return ELEMENT_BYTES * len(self.kernel.arrays) * self.subgroup

    @cached_property
    def register_bytes(self) -> int:
        """Size of BAR0."""
        return BLOCK_BYTES * len(self.maps())

    def maps(self) -> dict[str, tuple[int, RegisterMap]]:
        """Register blocks: name to offset in BAR0 and register map."""
        return {"updater0": (0, _updater_map(self.kernel))}


@dataclass(frozen=True, kw_only=True)
class AxpbyConfig:
    """Shape of a SIMD unit a x + b y."""

    lanes: Annotated[int, Option(meaning="fp32 elements of a beat", choices=LANES)] = 16


@dataclass(frozen=True, kw_only=True)
class GeneralUpdaterConfig:
    """Shape of the general updater alone, without a kernel."""

    lanes: Annotated[int, Option(meaning="fp32 elements of a beat", choices=LANES)] = 16
    rules: Annotated[
        tuple[str, ...],
        Option(meaning="its update rules", choices=tuple(BY_RULE), allowed="or FILE.py:NAME"),
    ] = UPDATER_OPTIONS["rules"]
    order: Annotated[
        Literal["default", "paper"],
        Option(
            meaning="order of Adam's arithmetic: torch's bits, or Algorithm 1 of the AXDIMM paper"
        ),
    ] = "default"

    def __post_init__(self) -> None:
        UpdateKernelConfig(lanes=self.lanes, rules=self.rules, order=self.order)  # checks them


@cache
def _updater_map(kernel: UpdateKernelConfig) -> RegisterMap:
    return adam_kernel_map(kernel)
