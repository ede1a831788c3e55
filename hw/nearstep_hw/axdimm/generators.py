"""Generators of AXDIMM channels and modules."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from nearstep_hw.generator import Generator
from nearstep_hw.updater.generators import functional_unit
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.codec import entries

if TYPE_CHECKING:
    from amaranth.lib import wiring


def _units(config: DimmConfig) -> "Mapping[str, wiring.Component]":
    return {"adam_fu": functional_unit(config.kernel)}


def _channel(config: DimmConfig) -> "wiring.Component":
    from nearstep_hw.axdimm.channel import AxdimmChannel
    from nearstep_hw.updater.unit_instance import UnitInstance

    return AxdimmChannel(config.kernel, config.timing, config.address_mapping, unit=UnitInstance)


def _module(config: DimmConfig) -> "wiring.Component":
    from nearstep_hw.axdimm.module import AxdimmModule
    from nearstep_hw.updater.unit_instance import UnitInstance

    return AxdimmModule(
        config.kernel,
        config.timing,
        config.address_mapping,
        channels=config.channels,
        unit=UnitInstance,
    )


GENERATORS = {
    "axdimm_channel": Generator(
        summary="AXDIMM channel: host bus, mode arbiter, controller, Adam kernel",
        config=DimmConfig,
        build=_channel,
        modules=_units,
        maps=lambda config: replace(config, channels=1).maps(),
        uses=tuple(each.name for each in entries(DimmConfig) if each.name != "channels"),
    ),
    "axdimm_module": Generator(
        summary="AXDIMM module: two channels behind one host bus",
        config=DimmConfig,
        build=_module,
        modules=_units,
        maps=DimmConfig.maps,
    ),
}
