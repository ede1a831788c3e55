"""Generators of cards and their updaters."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from nearstep_hw.generator import Generator
from nearstep_hw.updater.generators import UNIT_OPTIONS, functional_unit
from nearstep_spec.codec import entries
from nearstep_spec.smartssd.config import AxpbyConfig, GeneralUpdaterConfig, SmartssdConfig

if TYPE_CHECKING:
    from amaranth.lib import wiring

CARD_OPTIONS = tuple(
    each.name for each in entries(SmartssdConfig) if each.name != "subgroup_elements"
)
"""Options of the hardware: all but `subgroup_elements`, which only the host uses."""


def _card_unit(config: SmartssdConfig) -> "wiring.Component":
    return functional_unit(config.kernel)


def _card_units(config: SmartssdConfig) -> "Mapping[str, wiring.Component]":
    return {"smartssd_fu": _card_unit(config)}


def _card(config: SmartssdConfig) -> "wiring.Component":
    from nearstep_hw.smartssd.card import SmartssdCard
    from nearstep_hw.updater.unit_instance import UnitInstance

    return SmartssdCard(config, unit=partial(UnitInstance, module="smartssd_fu"))


def _pcie_card(config: SmartssdConfig) -> "wiring.Component":
    from nearstep_hw.smartssd.pcie_card import PcieCard
    from nearstep_hw.updater.unit_instance import UnitInstance

    return PcieCard(config, unit=partial(UnitInstance, module="smartssd_fu"))


def _series7_card(config: SmartssdConfig) -> "wiring.Component":
    from nearstep_hw.smartssd.series7_card import Series7Card
    from nearstep_hw.updater.unit_instance import UnitInstance

    return Series7Card(config, unit=partial(UnitInstance, module="smartssd_fu"))


def _axpby_unit(config: object) -> "wiring.Component":
    from nearstep_hw.rule.rtl import FunctionalUnit
    from nearstep_spec.rule.axpby import AXPBY

    return FunctionalUnit(AXPBY)


def _axpby_units(config: object) -> "Mapping[str, wiring.Component]":
    return {"axpby_fu": _axpby_unit(config)}


def _axpby(config: AxpbyConfig) -> "wiring.Component":
    from nearstep_hw.smartssd.axpby import AxpbyUnit
    from nearstep_hw.updater.unit_instance import UnitInstance

    return AxpbyUnit(lanes=config.lanes, unit=partial(UnitInstance, module="axpby_fu"))


def _general_updater(config: GeneralUpdaterConfig) -> "wiring.Component":
    from nearstep_hw.smartssd.updater import GeneralUpdater
    from nearstep_hw.updater.unit_instance import UnitInstance
    from nearstep_spec.rule.rules import RuleSet

    rules = RuleSet(config.rules, config.order).rules
    unit = partial(UnitInstance, module="general_fu")
    return GeneralUpdater(rules, lanes=config.lanes, unit=unit)


def _general_unit(config: GeneralUpdaterConfig) -> "wiring.Component":
    from nearstep_hw.rule.rtl import FunctionalUnit
    from nearstep_hw.smartssd.updater import general_rule
    from nearstep_spec.rule.rules import RuleSet

    return FunctionalUnit(general_rule(RuleSet(config.rules, config.order).rules))


def _general_units(config: GeneralUpdaterConfig) -> "Mapping[str, wiring.Component]":
    return {"general_fu": _general_unit(config)}


GENERATORS = {
    "axpby_fu": Generator(summary="functional unit of a x + b y", build=_axpby_unit),
    "axpby": Generator(
        summary="SIMD unit a x + b y: 16 lanes, a beat a cycle",
        config=AxpbyConfig,
        build=_axpby,
        modules=_axpby_units,
    ),
    "general_fu": Generator(
        summary="functional unit of every update rule",
        config=GeneralUpdaterConfig,
        build=_general_unit,
        uses=("rules", "order"),
    ),
    "general_updater": Generator(
        summary="every update rule on 16 lanes: beats in, beats out, no kernel around it",
        config=GeneralUpdaterConfig,
        build=_general_updater,
        modules=_general_units,
    ),
    "smartssd_fu": Generator(
        summary="functional unit of every update rule, gradient scale included",
        config=SmartssdConfig,
        build=_card_unit,
        uses=UNIT_OPTIONS,
    ),
    "smartssd_card": Generator(
        summary="SmartSSD card: registers, memory BAR, updater, port to DRAM",
        config=SmartssdConfig,
        build=_card,
        modules=_card_units,
        maps=SmartssdConfig.maps,
        uses=CARD_OPTIONS,
    ),
    "smartssd_pcie_card": Generator(
        summary="SmartSSD card on the PCIe hard block of an UltraScale+ device, port to DRAM",
        config=SmartssdConfig,
        build=_pcie_card,
        modules=_card_units,
        maps=SmartssdConfig.maps,
        uses=CARD_OPTIONS,
    ),
    "smartssd_series7_card": Generator(
        summary="SmartSSD card on the PCIe hard block of a 7-series device, port to DRAM",
        config=SmartssdConfig,
        build=_series7_card,
        modules=_card_units,
        uses=CARD_OPTIONS,
    ),
}
