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
"""Includes every header of the models; a library that uses them has it in common with
others."""

HOST_SLOTS = 2  # command slots of the host in a fabric cycle; a burst is as many pieces of data


class CTiming(structure("models/dram/library.cpp", "Timing")):
    """`nearstep::Timing`."""

    @classmethod
    def of(cls, timing: DramTiming) -> "CTiming":
        return cls(*(getattr(timing, name) for name, _ in cls._fields_))


class CGeometry(structure("models/dram/library.cpp", "Geometry")):
    """`nearstep::Geometry`."""

    @classmethod
    def of(cls, geometry: DramGeometry) -> "CGeometry":
        return cls(*(getattr(geometry, name) for name, _ in cls._fields_))


class CMapping(structure("models/dram/library.cpp", "Mapping")):
    """`nearstep::Mapping`: shifts in a beat number; no rank if there is one."""

    _words = ("bankgroup", "bank", "row", "column")

    @classmethod
    def of(cls, mapping: AddressMapping) -> "CMapping":
        beat_shift = BEAT_BYTES.bit_length() - 1
        fields = mapping.fields
        rank = mapping.rank.shift - beat_shift if mapping.rank.width else -1
        return cls(*(fields[word].shift - beat_shift for word in cls._words), rank)


class CSlot(structure("models/dram/library.cpp", "SlotIn")):
    """Pins of one command slot."""


class CIssued(structure("models/dram/library.cpp", "IssuedOut")):
    """A command and its clock; clock -1 stands for none."""


class CViolation(structure("models/dram/library.cpp", "ViolationOut")):
    """`nearstep::Violation`, with its text."""


class CBusClocks(structure("models/dram/library.cpp", "BusClocks")):
    """`nearstep::BusClocks`."""


class CRefreshExtremes(structure("models/dram/library.cpp", "RefreshExtremes")):
    """`nearstep::RefreshExtremes`."""


class CPortConfig(structure("models/dram/library.cpp", "PortConfig")):
    """`nearstep::PortConfig`."""


class CHostConfig(structure("models/dram/library.cpp", "HostConfig")):
    """`nearstep::HostConfig`."""


class CHostCycle(
    structure(
        "models/dram/library.cpp",
        "HostCycleOut",
        sizes={"HostCycle::kDataBytes": BEAT_BYTES // HOST_SLOTS},
    )
):
    """What the host drives in one fabric cycle."""


class CHostStatistics(structure("models/dram/library.cpp", "HostStatistics")):
    """`nearstep::HostStatistics`."""


@cache
def load() -> ctypes.CDLL:
    """The library, built on first use."""
    return load_functions(compile_library("dram", [], common=[SOURCE]), SOURCE)


def load_error() -> str:
    """Why the last constructor or submission failed."""
    return str(load().ddr4_last_error().decode())
