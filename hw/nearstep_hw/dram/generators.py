"""Generators of the DRAM controller."""

from typing import TYPE_CHECKING

from nearstep_hw.generator import Generator
from nearstep_spec.dram.config import DramConfig

if TYPE_CHECKING:
    from amaranth.lib import wiring


def _controller(config: DramConfig) -> "wiring.Component":
    from nearstep_hw.dram.controller import DramController

    return DramController(config.timing, config.address_mapping)


GENERATORS = {
    "dram_controller": Generator(
        summary="DDR4-1600 controller: AXI4 to DFI, four phases",
        config=DramConfig,
        build=_controller,
    )
}
