"""Generators of the NVMe controller."""

from typing import TYPE_CHECKING

from nearstep_hw.generator import Generator
from nearstep_spec.nvme import NvmeConfig

if TYPE_CHECKING:
    from amaranth.lib import wiring


def _card(config: NvmeConfig) -> "wiring.Component":
    from nearstep_hw.nvme.card import NvmeCard

    return NvmeCard(config)


GENERATORS = {
    "nvme_card": Generator(
        summary="queue engine of an NVMe controller: registers, doorbells, queues, PRPs, MSI-X",
        config=NvmeConfig,
        build=_card,
    )
}
