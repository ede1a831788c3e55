"""The library of a simulated pool."""

from __future__ import annotations

from pathlib import Path

from nearstep_hw.coarse.device import MemoryDevice
from nearstep_hw.reset import RegisteredReset
from nearstep_hw.verilog import to_verilog
from nearstep_sim.updater.library import device_library
from nearstep_sim.verilate.build import Model, verilate_library, verilog_of
from nearstep_spec.coarse.config import CoarseConfig
from nearstep_spec.codec import digest

HARNESS = Path(__file__).with_name("pool.cpp")


def pool_library(config: CoarseConfig, *, trace: bool = False) -> Path:
    """Build the shared library of `pool.cpp`: one model, an object for each device of a pool.

    For devices with an update kernel the library has the units in RTL, and C++ that can replace
    them.
    """
    programs = "" if config.updater is None else f" {digest(config.updater)}"
    device = verilog_of(
        f"memory_device {digest(config)}{programs}",
        lambda: to_verilog(RegisteredReset(MemoryDevice(config, unit=None)), "memory_device"),
    )
    if config.updater is None:
        return verilate_library(
            "coarse_pool",
            [Model(top="memory_device", verilog=device, prefix="Vdevice")],
            [HARNESS],
            defines={"COARSE_RING": 0, "COARSE_UPDATER": 0},
            trace=trace,
        )
    return device_library(
        "coarse_pool",
        Model(top="memory_device", verilog=device, prefix="Vshell"),
        [HARNESS],
        config.updater,
        trace,
        pairs_clock=False,
        defines={"COARSE_RING": 0, "COARSE_UPDATER": 1},
    )
