"""Generators of the PCIe endpoint."""

from typing import TYPE_CHECKING

from nearstep_hw.generator import Generator
from nearstep_spec.pcie import EndpointConfig

if TYPE_CHECKING:
    from amaranth.lib import wiring


def _endpoint(config: EndpointConfig) -> "wiring.Component":
    from nearstep_hw.pcie.endpoint import PcieEndpoint

    return PcieEndpoint(
        width=config.width,
        data_width=config.data_width,
        address_width=config.address_width,
        vectors=config.vectors,
    )


GENERATORS = {
    "pcie_endpoint": Generator(
        summary="PCIe endpoint of an UltraScale+ hard block: registers, AXI4 master, MSI-X",
        config=EndpointConfig,
        build=_endpoint,
    )
}
