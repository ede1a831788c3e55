"""Generators of memory devices and their sync cores."""

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from nearstep_hw.generator import Generator
from nearstep_hw.updater.generators import functional_unit
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.coarse.registers import device_maps
from nearstep_spec.codec import entries

if TYPE_CHECKING:
    from amaranth.lib import wiring

AROUND_THE_CORE = ("groups", "buffer_entries", "queue_jobs", "snapshot_pages", "rules")
"""Options of a device that do not shape its sync cores."""


def _sync_core(config: CoarseConfig) -> "wiring.Component":
    from nearstep_hw.coarse.sync_core import SyncCore

    return SyncCore(config)


def _device(config: CoarseConfig) -> "wiring.Component":
    from nearstep_hw.coarse.device import MemoryDevice
    from nearstep_hw.updater.unit_instance import UnitInstance

    return MemoryDevice(config, unit=partial(UnitInstance, module="coarse_fu"))


def _device_units(config: CoarseConfig) -> "Mapping[str, wiring.Component]":
    return {} if config.updater is None else {"coarse_fu": functional_unit(config.updater)}


GENERATORS = {
    "coarse_sync_core": Generator(
        summary="COARSE sync core: AXI4 master, entries in and out",
        config=CoarseConfig,
        build=_sync_core,
        uses=tuple(e.name for e in entries(CoarseConfig) if e.name not in AROUND_THE_CORE),
    ),
    "coarse_device": Generator(
        summary="COARSE memory device: sync cores, links, snapshot, update kernel, window",
        config=CoarseConfig,
        build=_device,
        modules=_device_units,
        maps=device_maps,
    ),
}
