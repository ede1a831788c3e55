"""The C++ DRAM models as a shared library: structures and entry points for `ctypes`."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

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


_P = ctypes.c_void_p
_I = ctypes.c_int
_U64 = ctypes.c_uint64
_TEXT = ctypes.c_char_p
_SIGNATURES: dict[str, tuple[type | None, Sequence[type]]] = {
    "ddr4_last_error": (_TEXT, ()),
    "ddr4_device_new": (_P, (_P, _P, ctypes.c_uint)),
    "ddr4_device_free": (None, (_P,)),
    "ddr4_device_command": (_I, (_P, _U64, _P)),
    "ddr4_device_advance": (_I, (_P, _U64)),
    "ddr4_device_play": (_U64, (_P, _U64, _P, _P, _P, _P, _P, _P)),
    "ddr4_device_violation": (_I, (_P, _P)),
    "ddr4_bus_new": (_P, (_P, _I)),
    "ddr4_bus_free": (None, (_P,)),
    "ddr4_bus_play": (_U64, (_P, _U64, _P, _P, _P, _P, _P, _P, _P, _P)),
    "ddr4_device_open_row": (ctypes.c_int64, (_P, ctypes.c_uint, ctypes.c_uint)),
    "ddr4_device_refresh_debt": (ctypes.c_int64, (_P, _U64)),
    "ddr4_device_refresh_offset": (None, (_P, ctypes.c_int64)),
    "ddr4_device_refresh_extremes": (None, (_P, _P)),
    "ddr4_device_counts": (None, (_P, _P)),
    "ddr4_device_account": (None, (_P, _P)),
    "ddr4_device_restart_account": (None, (_P, _U64)),
    "ddr4_device_trace": (_I, (_P, _TEXT, _TEXT)),
    "ddr4_device_trace_close": (None, (_P,)),
    "ddr4_device_read": (None, (_P, _P, _U64, _U64, _P)),
    "ddr4_device_write": (None, (_P, _P, _U64, _U64, _P)),
    "ddr4_device_allocated_rows": (_U64, (_P,)),
    "ddr4_port_new": (_P, (_P, _P)),
    "ddr4_port_free": (None, (_P,)),
    "ddr4_port_cycle_number": (_U64, (_P,)),
    "ddr4_port_uninitialised": (_U64, (_P,)),
    "ddr4_port_cycle": (_I, (_P, _P, _I, _I, _I, _P, _U64, _P)),
    "ddr4_host_new": (_P, (_P,)),
    "ddr4_host_free": (None, (_P,)),
    "ddr4_host_submit": (_I, (_P, _U64, _P, _P, _P, _P, _P)),
    "ddr4_host_give": (_I, (_P, _I, _P)),
    "ddr4_host_fence": (None, (_P,)),
    "ddr4_host_idle": (_I, (_P,)),
    "ddr4_host_cycle_number": (_U64, (_P,)),
    "ddr4_host_waiting": (_U64, (_P,)),
    "ddr4_host_error": (_TEXT, (_P,)),
    "ddr4_host_statistics": (None, (_P, _P)),
    "ddr4_host_tick": (None, (_P, _P, _P)),
    "ddr4_host_completions": (_U64, (_P, _U64, _P, _P, _P, _P)),
    "ddr4_bare_new": (_P, (_P, _P)),
    "ddr4_bare_free": (None, (_P,)),
    "ddr4_bare_host": (_P, (_P,)),
    "ddr4_bare_device": (_P, (_P, _I)),
    "ddr4_bare_run": (_U64, (_P, _U64, _I)),
}


@cache
def load() -> ctypes.CDLL:
    """The library, built on first use."""
    library = ctypes.CDLL(str(compile_library("dram", [], common=[SOURCE])))
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype = result
        function.argtypes = list(arguments)
    return library


def load_error() -> str:
    """Why the last constructor or submission failed."""
    return str(load().ddr4_last_error().decode())
