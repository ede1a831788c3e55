"""Options of emulated SmartSSD cards, as they stand in a device name."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from nearstep.backends.options import Family, Option, Variant
from nearstep_sim.updater.options import (
    BlockBytes,
    Compression,
    CopyOutFormats,
    Engine,
    GradientFormats,
    GradientScale,
    KernelOptions,
    Rules,
    Scan,
)
from nearstep_sim.verilate.options import Memory, SimulationOptions
from nearstep_spec.smartssd.config import SUBGROUPS_HELD, UPDATER, SmartssdConfig
from nearstep_spec.updater.config import ConfigError

UPDATER_TEXT = {
    name: ",".join(getattr(UPDATER, name))
    for name in ("rules", "gradient_formats", "copy_out_formats", "compression")
}
"""What a card's kernel has, as options."""


@dataclass(frozen=True, kw_only=True)
class CardOptions(KernelOptions):
    """Options that every emulated SmartSSD has, those of :class:`KernelOptions` among them."""

    rules: Rules = UPDATER_TEXT["rules"]
    gradient_formats: GradientFormats = UPDATER_TEXT["gradient_formats"]
    gradient_scale: GradientScale = UPDATER.gradient_scale
    copy_out_formats: CopyOutFormats = UPDATER_TEXT["copy_out_formats"]
    scan: Scan = UPDATER.scan
    compression: Compression = UPDATER_TEXT["compression"]
    chunk_bytes: BlockBytes = UPDATER.block_bytes
    memory_bytes: Annotated[
        int,
        Option(
            meaning="DRAM of the card; the host's is taken as it is used",
            allowed="a power of two from 4096 to 16GiB that holds two subgroups",
        ),
    ] = SmartssdConfig.memory_bytes
    subgroup_elements: Annotated[
        int | None,
        Option(
            meaning="elements that are updated while as many others are moved",
            allowed="whole chunks",
            unset="2**20, or what fits",
        ),
    ] = None

    def __post_init__(self) -> None:
        self.config()

    def config(self) -> SmartssdConfig:
        """Configuration of the card.

        Raises
        ------
        nearstep_spec.updater.config.ConfigError
        """
        try:
            kernel = replace(self.kernel_of(self.chunk_bytes), windows=UPDATER.windows)
        except ConfigError as error:
            text = str(error)
            if not text.startswith("block_bytes "):
                raise
            raise ConfigError(f"chunk_{text.removeprefix('block_')}") from None
        elements = self.subgroup_elements
        if elements is None:
            elements = SmartssdConfig.largest_subgroup(kernel, self.memory_bytes)
            if elements <= 0:
                least = SUBGROUPS_HELD * len(kernel.arrays) * self.chunk_bytes
                raise ConfigError(
                    f"memory_bytes must hold {SUBGROUPS_HELD} chunks of {self.chunk_bytes} bytes "
                    f"of each of {len(kernel.arrays)} arrays, {least}, not {self.memory_bytes}"
                )
        return SmartssdConfig(
            kernel=kernel, memory_bytes=self.memory_bytes, subgroup_elements=elements
        )


@dataclass(frozen=True, kw_only=True)
class GoldenCardOptions(CardOptions):
    """Options of ``golden:smartssd``."""

    engine: Engine = "cpp"


@dataclass(frozen=True, kw_only=True)
class VerilatedCardOptions(SimulationOptions, CardOptions):
    """Options of ``sim:smartssd``."""

    memory: Memory = "halfduplex"

    def __post_init__(self) -> None:
        CardOptions.__post_init__(self)
        SimulationOptions.__post_init__(self)


GOLDEN = Family(
    "golden:smartssd",
    (
        Variant(
            options=GoldenCardOptions,
            opens="nearstep_sim.smartssd.golden:GoldenCard",
            summary="a SmartSSD card, without a clock",
        ),
    ),
)
SIM = Family(
    "sim:smartssd",
    (
        Variant(
            options=VerilatedCardOptions,
            opens="nearstep_sim.smartssd.card:CardBackend",
            summary="the RTL of a SmartSSD card",
        ),
    ),
)
