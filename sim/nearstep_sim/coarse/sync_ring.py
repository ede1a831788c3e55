"""A ring of Verilated sync cores with their memories, for their tests and measurements."""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep_hw.coarse.sync_core import SyncCore
from nearstep_hw.verilog import to_verilog
from nearstep_sim.models.memory import GUARD, UNWRITTEN, EmulatedMemory
from nearstep_sim.verilate.abi import load, structure
from nearstep_sim.verilate.build import Model, verilate_library, verilog_of
from nearstep_sim.verilate.harness import CInjection, FaultRecord
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.coarse.registers import ReduceOp, Wire

__all__ = ["STALLS", "CoreReport", "Job", "SyncRing"]

SOURCE = Path(__file__).with_suffix(".cpp")

STALLS: Mapping[str, tuple[float, float]] = {
    "free": (0.0, 0.0),
    "source": (0.6, 0.0),
    "sink": (0.0, 0.6),
    "both": (0.5, 0.5),
}
"""Chances that the source, and the sink, of a link stall in a cycle."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job of a sync core, see `JobLayout`."""

    source: int
    destination: int
    elements: int
    operation: int = ReduceOp.SUM
    wire: int = Wire.FP32
    scale: float = 1.0
    tag: int = 0
    divisor: int = 0

    def but(self, **changes: Any) -> "Job":
        return replace(self, **changes)


_Job = structure("coarse/sync_ring.cpp", "Job")


_Settings = structure("coarse/sync_ring.cpp", "Settings")


class CoreReport(structure("coarse/sync_ring.cpp", "Report", types={"Fault": FaultRecord})):
    """Results of one core in a run. `cycles` is the cycle of the last `o_done`."""


class SyncRing:
    """`members` sync cores in a ring, and the memory of each.

    Parameters
    ----------
    config : of the devices.
    members : cores.
    """

    def __init__(self, config: CoarseConfig, members: int) -> None:
        self.config = config
        self.members = members
        self.memories = [EmulatedMemory(config.memory_bytes) for _ in range(members)]
        for memory in self.memories:
            memory.mark(0, config.memory_bytes, UNWRITTEN)
        library = load(self.library, SOURCE)
        self._library = library
        self._handle = library.ring_open(members)

    @cached_property
    def library(self) -> Path:
        """Return the shared library, built unless cached."""
        config = self.config
        verilog = verilog_of(
            f"sync_core {config!r}", lambda: to_verilog(SyncCore(config), "SyncCore")
        )
        model = Model(top="SyncCore", verilog=verilog, prefix="VSyncCore")
        defines = {"ADDRESS_WIDTH": config.address_width}
        return verilate_library("sync_ring", [model], [SOURCE], defines=defines)

    def fill(self, core: int, address: int, tensor: NDArray[np.float32]) -> None:
        """Put a tensor into the memory of a core."""
        self.memories[core].write(address, np.frombuffer(tensor.tobytes(), np.uint8))

    def take(self, core: int, address: int, elements: int) -> NDArray[np.uint32]:
        """Patterns of a tensor in the memory of a core."""
        out = np.empty(4 * elements, np.uint8)
        self.memories[core].read(address, out)
        return out.view(np.uint32)

    def forget(self, free: Sequence[tuple[int, int]]) -> None:
        """Restrict accesses to [start, end) of each range, marked as unwritten."""
        for memory in self.memories:
            memory.state[:] = GUARD
            for start, end in free:
                memory.state[start // 64 : -(-end // 64)] = UNWRITTEN

    def run(
        self,
        jobs: Sequence[Job | None],
        *,
        positions: Sequence[int] | None = None,
        members: int | None = None,
        window: tuple[int, int] | None = None,
        stall: str = "free",
        memory_stall: float = 0.0,
        memory_latency: int = 10,
        link_latency: int = 8,
        slots: int | None = None,
        half_duplex: bool = False,
        seed: int = 1,
        inject: tuple[int, CInjection] | None = None,
        halted: bool = False,
        max_cycles: int = 5_000_000,
        quiet: int = 3000,
    ) -> list[CoreReport]:
        """Start a job on each core, and run until all are done or hung."""
        config, count = self.config, self.members
        source, sink = STALLS[stall]
        low, high = window or (0, config.memory_bytes)
        settings = _Settings(
            window_base=low,
            window_limit=high,
            capacity=config.memory_bytes,
            memory_latency=memory_latency,
            link_latency=link_latency,
            slots=config.chunks_ahead + 2 if slots is None else slots,
            seed=seed,
            max_cycles=max_cycles,
            quiet=quiet,
            source_stall=int(65536 * source),
            sink_stall=int(65536 * sink),
            memory_stall=int(65536 * memory_stall),
            half_duplex=half_duplex,
        )
        records = (_Job * count)()
        for record, job in zip(records, jobs, strict=True):
            if job is not None:
                record.source, record.destination = job.source, job.destination
                record.elements, record.tag = job.elements, job.tag
                record.operation, record.wire = job.operation, job.wire
                record.divisor = job.divisor
                record.scale = int(np.float32(job.scale).view(np.uint32))
        has = np.array([job is not None for job in jobs], np.uint8)
        places = np.array(range(count) if positions is None else positions, np.uint8)
        pointers = ctypes.c_void_p * count
        reports = (CoreReport * count)()
        core, injection = inject or (-1, CInjection())
        self._library.ring_run(
            self._handle,
            ctypes.byref(settings),
            records,
            has.ctypes.data,
            places.ctypes.data,
            count if members is None else members,
            pointers(*(memory.data.ctypes.data for memory in self.memories)),
            pointers(*(memory.state.ctypes.data for memory in self.memories)),
            ctypes.byref(injection),
            core,
            int(halted),
            reports,
        )
        return list(reports)

    def clear(self) -> int:
        """Halt and clear all cores; return the cycles until memories were idle, 0 if never."""
        return int(self._library.ring_clear(self._handle, 10_000))

    def close(self) -> None:
        """Free the models."""
        self._library.ring_close(self._handle)
