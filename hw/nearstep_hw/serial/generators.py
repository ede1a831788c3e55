"""Generators of the board's end of the serial link."""

from typing import TYPE_CHECKING

from nearstep_hw.generator import Generator
from nearstep_spec.serial.config import EndpointConfig

if TYPE_CHECKING:
    from amaranth.lib import wiring


def _endpoint(config: EndpointConfig) -> "wiring.Component":
    from nearstep_hw.serial.endpoint import SerialEndpoint
    from nearstep_hw.serial.uart import divisor_of

    return SerialEndpoint(
        divisor=divisor_of(clock_hz=config.clock_hz, baud=config.baud),
        manifest=config.manifest.encode(),
        address_width=config.address_width,
        data_width=config.data_width,
        window=config.window,
        timeout_cycles=config.timeout_cycles,
    )


GENERATORS = {
    "serial_endpoint": Generator(
        summary="Board's end of the serial link: UART, frames, registers, AXI4 master",
        config=EndpointConfig,
        build=_endpoint,
    )
}
