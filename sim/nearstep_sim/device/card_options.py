"""Options of the emulated SmartSSD cards, as they stand in a device name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from nearstep_hw.axdimm.config import AdamKernelConfig
from nearstep_hw.smartssd.config import UPDATER, SmartssdConfig
from nearstep_sim.device.options import SimulationOptions


def _names(values: tuple[str, ...]) -> str:
    return ",".join(values)


@dataclass(frozen=True, kw_only=True)
class SmartssdOptions:
    """Options that every emulated card has.

    Parameters
    ----------
    lanes, functional_units, order :
        As in :class:`nearstep_hw.axdimm.config.AdamKernelConfig`.
    chunk_bytes : int
        Bytes of a chunk of one array: its ``block_bytes``.
    rules : str
        Update rules of the kernel, with commas between.
    gradient_formats : str
        Formats that gradients may have, with commas between.
    gradient_scale : bool
        Whether the kernel can multiply gradients by a factor.
    subgroup_elements : int | None
        Parameters that are updated at a time, in whole chunks. None is 2**20, or as many as fit
        into the memory twice.
    memory_bytes : int
        Size of the card's DRAM, a power of two. Pages are taken as they are used.
    """

    lanes: int = UPDATER.lanes
    functional_units: int | None = None
    chunk_bytes: int = UPDATER.block_bytes
    order: Literal["default", "paper"] = "default"
    rules: str = _names(UPDATER.rules)
    gradient_formats: str = _names(UPDATER.gradient_formats)
    gradient_scale: bool = UPDATER.gradient_scale
    subgroup_elements: int | None = None
    memory_bytes: int = SmartssdConfig.memory_bytes

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> SmartssdConfig:
        """Configuration of the card.

        Raises
        ------
        nearstep_hw.axdimm.config.ConfigError
        """
        kernel = AdamKernelConfig(
            lanes=self.lanes,
            functional_units=self.functional_units,
            block_bytes=self.chunk_bytes,
            order=self.order,
            rules=tuple(self.rules.split(",")),
            gradient_formats=tuple(self.gradient_formats.split(",")),
            gradient_scale=self.gradient_scale,
            windows=UPDATER.windows,
        )
        elements = self.subgroup_elements
        if elements is None:
            elements = SmartssdConfig.largest_subgroup(kernel, self.memory_bytes)
        return SmartssdConfig(
            kernel=kernel, memory_bytes=self.memory_bytes, subgroup_elements=elements
        )


@dataclass(frozen=True, kw_only=True)
class CardOptions(SimulationOptions, SmartssdOptions):
    """Options of ``sim:smartssd``."""

    memory: Literal["ideal", "halfduplex"] = "halfduplex"

    def __post_init__(self) -> None:
        SimulationOptions.__post_init__(self)
        SmartssdOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class GoldenCardOptions(SmartssdOptions):
    """Options of ``golden:smartssd``.

    Parameters
    ----------
    engine : str
        ``cpp`` is compiled on first use; ``numpy`` needs no compiler and is slower.
    """

    engine: Literal["cpp", "numpy"] = "cpp"
