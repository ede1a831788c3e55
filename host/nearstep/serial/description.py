"""Descriptions of boards: manifests decoded to configurations, checked against this host."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import version
from types import MappingProxyType
from typing import Any

from nearstep.errors import ArgumentError
from nearstep.serial.errors import FirmwareError, WrongBoardError
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.boards.registers import board_map
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.coarse.registers import device_maps as coarse_maps
from nearstep_spec.codec import CodecError, digest, from_json, to_json
from nearstep_spec.csr.model import RegisterMap
from nearstep_spec.rule.file import is_in_file
from nearstep_spec.serial.manifest import Manifest, ManifestError
from nearstep_spec.smartssd.config import SmartssdConfig
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import device_maps as kernel_maps

BOARD = "board"
"""Name of the board's own block of registers, in a manifest."""

Maps = Mapping[str, tuple[int, RegisterMap]]

_MAPS: Mapping[type, Callable[[Any], Maps]] = MappingProxyType(
    {
        UpdateKernelConfig: kernel_maps,
        CoarseConfig: coarse_maps,
        DimmConfig: DimmConfig.maps,
        SmartssdConfig: SmartssdConfig.maps,
    }
)
_FAMILIES: Mapping[str, Callable[[Manifest], type[Any]]] = MappingProxyType(
    {
        "axdimm": lambda each: DimmConfig if "arbiter0" in each.map_hashes else UpdateKernelConfig,
        "coarse": lambda each: CoarseConfig,
        "smartssd": lambda each: SmartssdConfig,
    }
)
"""Kind of configuration of each family; names of register blocks tell two kinds apart."""


def map_hashes(config: object) -> dict[str, int]:
    """Return the hash of each register map of a board with this device.

    Raises
    ------
    ArgumentError : no board has such a device.
    """
    if type(config) not in _MAPS:
        known = ", ".join(each.__name__ for each in _MAPS)
        raise ArgumentError(f"a board has a device of {known}; not {type(config).__name__}")
    maps = _MAPS[type(config)](config)
    return {BOARD: board_map().hash(), **{name: each.hash() for name, (_, each) in maps.items()}}


def describe(
    config: Any,
    *,
    board: str,
    family: str,
    memory_bytes: int,
    regions: tuple[tuple[int, int], ...],
    clock_hz: int,
) -> Manifest:
    """Return the manifest of a board whose device has this configuration."""
    kernel = getattr(config, "kernel", config)
    named = (*getattr(kernel, "rules", ()), *getattr(kernel, "compression", ()))
    in_files = any(map(is_in_file, named))
    return Manifest(
        board=board,
        family=family,
        config=to_json(config),
        map_hashes=map_hashes(config),
        memory_bytes=memory_bytes,
        regions=regions,
        clock_hz=clock_hz,
        package=version("nearstep"),
        digest=digest(config) if in_files else "",
    )


def read_manifest(text: bytes, port: str) -> Manifest:
    """Decode the manifest that a board sent.

    Raises
    ------
    FirmwareError : this host does not know the format.
    """
    try:
        return Manifest.decode(text)
    except ManifestError as error:
        expected = "one that this version of nearstep reads"
        raise FirmwareError(f"manifest of the board on {port}", expected, str(error)) from error


def config_of(manifest: Manifest, port: str) -> Any:
    """Return the configuration of the device on a board.

    Raises
    ------
    WrongBoardError : the device's family has no driver.
    FirmwareError : options, register maps or update rules are unknown, or differ from this
        version's.
    """
    made_by = f"{manifest.board} on {port}, made by nearstep {manifest.package or '?'}"
    if manifest.family not in _FAMILIES:
        known = f"one of {', '.join(_FAMILIES)}"
        raise WrongBoardError(f"family of {made_by},", known, repr(manifest.family))
    try:
        config = from_json(_FAMILIES[manifest.family](manifest), manifest.config)
    except CodecError as error:
        expected = f"one of nearstep {version('nearstep')}"
        raise FirmwareError(f"configuration of {made_by},", expected, str(error)) from error
    _check(manifest, config, made_by)
    return config


def _check(manifest: Manifest, config: Any, made_by: str) -> None:
    expected = map_hashes(config)
    if set(expected) != set(manifest.map_hashes):
        blocks = ", ".join(sorted(expected)), ", ".join(sorted(manifest.map_hashes))
        raise FirmwareError(f"register blocks of {made_by},", *blocks)
    for name, mine in expected.items():
        theirs = manifest.map_hashes[name]
        if theirs != mine:
            what = f"hash of the register map of {name} of {made_by},"
            raise FirmwareError(what, f"{mine:#010x}", f"{theirs:#010x}")
    if manifest.digest and manifest.digest != digest(config):
        what = f"digest of the update rules of {made_by},"
        raise FirmwareError(what, digest(config), manifest.digest)
