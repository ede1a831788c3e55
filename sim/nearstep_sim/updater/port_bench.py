"""The memory models and the AXI checker of `sim:axdimm` by themselves, for their tests."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

from nearstep_sim.models.memory import EmulatedMemory
from nearstep_sim.verilate.abi import load, structure
from nearstep_sim.verilate.build import compile_library
from nearstep_sim.verilate.harness import FaultRecord

SOURCE = Path(__file__).with_suffix(".cpp")


BEAT = {"Beat": ctypes.c_uint8 * 64}
"""`std::array<std::uint8_t, 64>`."""


class AddressPins(structure("updater/port_bench.cpp", "AddressPins", types=BEAT)):
    """Channel AR or AW in one cycle."""


class ManagerPins(structure("updater/port_bench.cpp", "ManagerPins", types=BEAT)):
    """What an AXI manager drives in one cycle."""


class SubordinatePins(structure("updater/port_bench.cpp", "SubordinatePins", types=BEAT)):
    """What an AXI subordinate drives in one cycle."""


_Traffic = structure("updater/port_bench.cpp", "Traffic")


class Report(structure("updater/port_bench.cpp", "Report")):
    """Results of a stream of bursts to a memory."""


@cache
def _library() -> ctypes.CDLL:
    return load(compile_library("port_bench", [SOURCE]), SOURCE)


class Checker:
    """The C++ AXI checker, fed cycle by cycle."""

    def __init__(self, beat_bytes: int) -> None:
        self._handle = _library().checker_open(beat_bytes)

    def cycle(self, manager: ManagerPins, subordinate: SubordinatePins) -> None:
        """Check one cycle in which both sides drive these pins."""
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
    """Run bursts back to back on a memory: reads from its start, writes from its middle."""
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
