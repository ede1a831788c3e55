"""Options of the emulated SmartSSD cards, as they stand in a device name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from nearstep_hw.smartssd.config import UPDATER, SmartssdConfig
from nearstep_sim.device.options import KernelOptions, SimulationOptions


@dataclass(frozen=True, kw_only=True)
class SmartssdOptions(KernelOptions):
    """Options that every emulated card has, those of :class:`KernelOptions` among them.

    ``block_bytes`` are those of a chunk of one array.

    Parameters
    ----------
    subgroup_elements : int | None
        Parameters that are updated at a time, in whole chunks. None is 2**20, or as many as fit
        into the memory twice.
    memory_bytes : int
        Size of the card's DRAM, a power of two. Pages are taken as they are used.
    """

    rules: str = ",".join(UPDATER.rules)
    gradient_formats: str = ",".join(UPDATER.gradient_formats)
    gradient_scale: bool = UPDATER.gradient_scale
    copy_out_formats: str = ",".join(UPDATER.copy_out_formats)
    scan: bool = UPDATER.scan
    compression: str = ",".join(UPDATER.compression)
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
        kernel = replace(self.kernel(), windows=UPDATER.windows)
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
