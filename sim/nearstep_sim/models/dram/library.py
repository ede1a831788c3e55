"""The C++ DRAM models as a shared library: structures and entry points for `ctypes`."""

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path

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


class CTiming(ctypes.Structure):
    """`nearstep::Timing`."""

    _names = (
        *("cl", "cwl", "t_rcd", "t_rp", "t_ras", "t_rc"),
        *("t_ccd_s", "t_ccd_l", "t_rrd_s", "t_rrd_l", "t_faw"),
        *("t_wr", "t_wtr_s", "t_wtr_l", "t_rtp", "t_rfc", "t_refi"),
        *("t_mrd", "t_mod", "t_zqcs", "t_zqoper"),
    )
    _fields_ = tuple((name, ctypes.c_int32) for name in _names)

    @classmethod
    def of(cls, timing: DramTiming) -> "CTiming":
        return cls(*(getattr(timing, name) for name in cls._names))


class CGeometry(ctypes.Structure):
    """`nearstep::Geometry`."""

    _names = ("bank_group_bits", "bank_bits", "row_bits", "column_bits")
    _fields_ = tuple((name, ctypes.c_int32) for name in _names)

    @classmethod
    def of(cls, geometry: DramGeometry) -> "CGeometry":
        return cls(*(getattr(geometry, name) for name in cls._names))


class CMapping(ctypes.Structure):
    """`nearstep::Mapping`: shifts in a beat number."""

    _words = ("bankgroup", "bank", "row", "column")
    _fields_ = tuple((f"{word}_shift", ctypes.c_int32) for word in _words)

    @classmethod
    def of(cls, mapping: AddressMapping) -> "CMapping":
        beat_shift = BEAT_BYTES.bit_length() - 1
        fields = mapping.fields
        return cls(*(fields[word].shift - beat_shift for word in cls._words))


class CSlot(ctypes.Structure):
    """Pins of one command slot."""

    _fields_ = tuple((n, ctypes.c_int32) for n in ("cs_n", "act_n", "address", "bg", "ba"))


class CIssued(ctypes.Structure):
    """A command and its clock; clock -1 stands for none."""

    _fields_ = (
        ("ck", ctypes.c_int64),
        ("command", ctypes.c_int32),
        ("bg", ctypes.c_int32),
        ("ba", ctypes.c_int32),
        ("address", ctypes.c_int32),
    )


class CViolation(ctypes.Structure):
    """`nearstep::Violation`, with its text."""

    _fields_ = (
        ("previous", CIssued),
        ("next", CIssued),
        ("minimum", ctypes.c_int64),
        ("rule", ctypes.c_char * 64),
        ("text", ctypes.c_char * 256),
    )


class CBusClocks(ctypes.Structure):
    """`nearstep::BusClocks`."""

    _names = ("data", "start", "refresh", "turnaround", "row", "bank_group", "other")
    _fields_ = tuple((name, ctypes.c_uint64) for name in _names)


class CRefreshExtremes(ctypes.Structure):
    """`nearstep::RefreshExtremes`."""

    _names = ("longest_gap", "shortest_seventeen", "lowest_debt", "highest_debt")
    _fields_ = tuple((name, ctypes.c_int64) for name in _names)


class CPortConfig(ctypes.Structure):
    """`nearstep::PortConfig`."""

    _fields_ = tuple(
        (name, ctypes.c_int32) for name in ("phases", "data_bytes", "read_latency", "write_latency")
    )


class CHostConfig(ctypes.Structure):
    """`nearstep::HostConfig`."""

    _fields_ = (
        ("timing", CTiming),
        ("geometry", CGeometry),
        ("mapping", CMapping),
        ("ranks", ctypes.c_int32),
        ("read_latency", ctypes.c_int32),
        ("write_latency", ctypes.c_int32),
        ("fr_fcfs", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("overtake", ctypes.c_int32),
        ("postpone", ctypes.c_int32),
        ("column_slot", ctypes.c_int32),
        ("stall", ctypes.c_int32),
        ("refresh_offset", ctypes.c_int32),
        ("whim", ctypes.c_int32),
        ("pull_in", ctypes.c_int32),
        ("seed", ctypes.c_uint64),
    )


class CHostCycle(ctypes.Structure):
    """What the host drives in one fabric cycle."""

    _fields_ = (
        ("rank", ctypes.c_int32 * HOST_SLOTS),
        ("slots", CSlot * HOST_SLOTS),
        ("wrdata_en", ctypes.c_int32),
        ("wrdata_mask", ctypes.c_uint32),
        ("wrdata", ctypes.c_uint8 * (BEAT_BYTES // HOST_SLOTS)),
    )


class CHostStatistics(ctypes.Structure):
    """`nearstep::HostStatistics`."""

    _names = (
        *("cycles", "loads", "stores", "row_hits", "row_misses", "row_conflicts", "refreshes"),
        *("busy_cycles", "load_latency_sum", "load_latency_max"),
    )
    _fields_ = tuple((name, ctypes.c_uint64) for name in _names)


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
