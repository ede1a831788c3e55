"""The library of a simulated DIMM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nearstep_hw.axdimm.channel import AxdimmChannel
from nearstep_hw.verilog import to_verilog
from nearstep_sim.models.dram.library import SOURCE as DRAM_MODELS
from nearstep_sim.updater.library import device_library
from nearstep_sim.verilate.build import Model, verilog_of
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.codec import digest

HARNESS = Path(__file__).with_name("dimm.cpp")


def dimm_library(dimm: DimmConfig, *, trace: bool = False) -> Path:
    """The shared library of `dimm.cpp`: as many channels as wanted, each an object of one model.

    It holds the units in RTL and the C++ kernel that can stand in for them.
    """
    one = replace(dimm, channels=1)  # the channels are all the same
    shell = verilog_of(
        f"axdimm_channel {digest(one)}",
        lambda: to_verilog(
            AxdimmChannel(dimm.kernel, dimm.timing, dimm.address_mapping, unit=None),
            "axdimm_channel",
        ),
    )
    return device_library(
        "axdimm_dimm",
        Model(top="axdimm_channel", verilog=shell, prefix="Vshell"),
        [HARNESS],
        dimm.kernel,
        trace,
        pairs_clock=False,
        common=[DRAM_MODELS],
    )
