"""Generators of update kernels and their functional units."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from nearstep_hw.generator import Generator
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import device_maps

if TYPE_CHECKING:
    from amaranth.lib import wiring

UNIT_OPTIONS = ("order", "rules", "gradient_scale", "technology")
"""Options of a kernel that shape its functional unit."""


def functional_unit(config: UpdateKernelConfig) -> "wiring.Component":
    """Make the functional unit of a kernel."""
    from nearstep_hw.rule.rtl import FunctionalUnit
    from nearstep_spec.updater.registers import update_rule

    return FunctionalUnit(update_rule(config), technology=config.technology)


def _units(config: UpdateKernelConfig) -> "Mapping[str, wiring.Component]":
    return {"adam_fu": functional_unit(config)}


def _kernel(config: UpdateKernelConfig) -> "wiring.Component":
    from nearstep_hw.updater.unit_instance import UnitInstance
    from nearstep_hw.updater.update_kernel import UpdateKernel

    return UpdateKernel(config, unit=UnitInstance)


GENERATORS = {
    "adam_fu": Generator(
        summary="functional unit of Adam and AdamW",
        config=UpdateKernelConfig,
        build=functional_unit,
        uses=UNIT_OPTIONS,
    ),
    "adam_kernel": Generator(
        summary="AXDIMM Adam kernel: AXI4 master, AXI4-Lite registers",
        config=UpdateKernelConfig,
        build=_kernel,
        modules=_units,
        maps=device_maps,
    ),
}
