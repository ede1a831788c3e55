"""The memory models and the AXI checker of ``sim:axdimm`` by themselves, for their tests."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from nearstep_sim.models.memory import EmulatedMemory
from nearstep_sim.verilate.build import compile_library
from nearstep_sim.verilate.harness import FaultRecord

SOURCE = Path(__file__).with_suffix(".cpp")


class AddressPins(ctypes.Structure):
    """Channel AR or AW in one cycle."""

    _fields_ = (
        ("valid", ctypes.c_bool),
        ("id", ctypes.c_uint8),
        ("addr", ctypes.c_uint64),
        ("len", ctypes.c_uint8),
        ("size", ctypes.c_uint8),
        ("burst", ctypes.c_uint8),
    )


class ManagerPins(ctypes.Structure):
    """What an AXI manager drives in one cycle."""

    _fields_ = (
        ("ar", AddressPins),
        ("aw", AddressPins),
        ("wvalid", ctypes.c_bool),
        ("wlast", ctypes.c_bool),
        ("wstrb", ctypes.c_uint64),
        ("wdata", ctypes.c_uint8 * 64),
        ("rready", ctypes.c_bool),
        ("bready", ctypes.c_bool),
    )


class SubordinatePins(ctypes.Structure):
    """What an AXI subordinate drives in one cycle."""

    _fields_ = (
        ("arready", ctypes.c_bool),
        ("awready", ctypes.c_bool),
        ("wready", ctypes.c_bool),
        ("rvalid", ctypes.c_bool),
        ("rlast", ctypes.c_bool),
        ("rid", ctypes.c_uint8),
        ("rresp", ctypes.c_uint8),
        ("rdata", ctypes.c_uint8 * 64),
        ("bvalid", ctypes.c_bool),
        ("bid", ctypes.c_uint8),
        ("bresp", ctypes.c_uint8),
    )


class _Traffic(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("state", ctypes.c_void_p),
        ("capacity", ctypes.c_uint64),
        ("latency", ctypes.c_uint64),
        ("seed", ctypes.c_uint64),
        ("reads", ctypes.c_uint64),
        ("writes", ctypes.c_uint64),
        ("max_cycles", ctypes.c_uint64),
        ("half_duplex", ctypes.c_uint32),
        ("stall", ctypes.c_uint32),
        ("beat_bytes", ctypes.c_uint32),
        ("burst_beats", ctypes.c_uint32),
    )


class Report(ctypes.Structure):
    """What a memory did with a stream of bursts."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "cycles",
            "read_beats",
            "write_beats",
            "turnarounds",
            "answered_reads",
            "answered_writes",
            "sum",
        )
    )


@cache
def _library() -> ctypes.CDLL:
    lib = ctypes.CDLL(str(compile_library("port_bench", [SOURCE])))
    lib.checker_open.restype = ctypes.c_void_p
    lib.checker_open.argtypes = [ctypes.c_uint32]
    lib.checker_close.argtypes = [ctypes.c_void_p]
    pins = [ctypes.POINTER(ManagerPins), ctypes.POINTER(SubordinatePins)]
    lib.checker_cycle.argtypes = [ctypes.c_void_p, *pins]
    lib.checker_fault.argtypes = [ctypes.c_void_p, ctypes.POINTER(FaultRecord)]
    return lib


class Checker:
    """The C++ AXI checker, fed cycle by cycle.

    Parameters
    ----------
    beat_bytes: int
    """

    def __init__(self, beat_bytes: int) -> None:
        self._handle = _library().checker_open(beat_bytes)

    def cycle(self, manager: ManagerPins, subordinate: SubordinatePins) -> None:
        """One cycle in which both sides drive these pins."""
        _library().checker_cycle(self._handle, ctypes.byref(manager), ctypes.byref(subordinate))

    def violation(self) -> tuple[str, str] | None:
        """Channel and rule of the first violation, None if there was none."""
        fault = FaultRecord()
        _library().checker_fault(self._handle, ctypes.byref(fault))
        return (fault.channel.decode(), fault.rule.decode()) if fault.kind else None

    def close(self) -> None:
        _library().checker_close(self._handle)


def run_traffic(
    memory: EmulatedMemory,
    *,
    half_duplex: bool,
    latency: int,
    reads: int,
    writes: int,
    burst_beats: int = 64,
    beat_bytes: int = 64,
    stall: float = 0.0,
    seed: int = 1,
    max_cycles: int = 1_000_000,
) -> tuple[Report, FaultRecord]:
    """Bursts back to back against a memory: reads from its start, writes from its middle."""
    report, fault = Report(), FaultRecord()
    traffic = _Traffic(
        data=memory.data.ctypes.data,
        state=memory.state.ctypes.data,
        capacity=memory.data.size,
        latency=latency,
        seed=seed,
        reads=reads,
        writes=writes,
        max_cycles=max_cycles,
        half_duplex=int(half_duplex),
        stall=round(stall * 65536),
        beat_bytes=beat_bytes,
        burst_beats=burst_beats,
    )
    _library().traffic_run(ctypes.byref(traffic), ctypes.byref(report), ctypes.byref(fault))
    return report, fault
