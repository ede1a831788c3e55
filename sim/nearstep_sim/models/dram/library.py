"""The C++ DRAM models as a shared library: structures and entry points for `ctypes`."""

import ctypes
from functools import cache
from pathlib import Path

from nearstep_sim.verilate.abi import load as load_functions
from nearstep_sim.verilate.abi import structure
from nearstep_sim.verilate.build import compile_library
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry
from nearstep_spec.dram.timing import DramTiming

__all__ = [
    "HOST_SLOTS",
    "SOURCE",
    "CBusClocks",
    "CGeometry",
    "CHostConfig",
    "CHostCycle",
    "CHostStatistics",
    "CIssued",
    "CMapping",
    "CPortConfig",
    "CRefreshExtremes",
    "CSlot",
    "CTiming",
    "CViolation",
    "load",
    "load_error",
]

SOURCE = Path(__file__).with_name("library.cpp")
"""Source that includes every header of the models, common to all libraries that use them."""

HEADERS = "models/dram/library.cpp"
HOST_SLOTS = 2  # command slots of the host in a fabric cycle; a burst is as many pieces of data


class CTiming(structure(HEADERS, "Timing")):
    """`nearstep::Timing`."""

    @classmethod
    def of(cls, timing: DramTiming) -> "CTiming":
        return cls(*(getattr(timing, name) for name, _ in cls._fields_))


class CGeometry(structure(HEADERS, "Geometry")):
    """`nearstep::Geometry`."""

    @classmethod
    def of(cls, geometry: DramGeometry) -> "CGeometry":
        return cls(*(getattr(geometry, name) for name, _ in cls._fields_))


class CMapping(structure(HEADERS, "Mapping")):
    """`nearstep::Mapping`: shifts in a beat number; no rank if there is one."""

    _words = ("bankgroup", "bank", "row", "column")

    @classmethod
    def of(cls, mapping: AddressMapping) -> "CMapping":
        beat_shift = BEAT_BYTES.bit_length() - 1
        fields = mapping.fields
        rank = mapping.rank.shift - beat_shift if mapping.rank.width else -1
        return cls(*(fields[word].shift - beat_shift for word in cls._words), rank)


CSlot, CIssued, CViolation = (
    structure(HEADERS, name) for name in ("SlotIn", "IssuedOut", "ViolationOut")
)
"""Pins of one command slot; a command and its clock, -1 for none; what was violated, with text."""
CBusClocks = structure(HEADERS, "BusClocks")
CRefreshExtremes = structure(HEADERS, "RefreshExtremes")
CPortConfig = structure(HEADERS, "PortConfig")
CHostConfig = structure(HEADERS, "HostConfig")
CHostStatistics = structure(HEADERS, "HostStatistics")
CHostCycle = structure(
    HEADERS, "HostCycleOut", sizes={"HostCycle::kDataBytes": BEAT_BYTES // HOST_SLOTS}
)
"""What the host drives in one fabric cycle."""


@cache
def load() -> ctypes.CDLL:
    """The library, built on first use."""
    return load_functions(compile_library("dram", [], common=[SOURCE]), SOURCE)


def load_error() -> str:
    """Why the last constructor or submission failed."""
    return str(load().ddr4_last_error().decode())
