"""The library of a simulated DIMM."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nearstep_hw import generate
from nearstep_hw.axdimm.channel import AxdimmChannel
from nearstep_hw.updater.unit_instance import UNIT_MODULE
from nearstep_hw.verilog import to_verilog
from nearstep_sim.models.dram.library import SOURCE as DRAM_MODELS
from nearstep_sim.updater.library import device_library
from nearstep_sim.verilate.build import Model, verilate_library, verilog_of
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.codec import digest

HARNESS = Path(__file__).with_name("dimm.cpp")
TOP = "axdimm_module"
"""The top that is shipped."""


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


def shipped_verilog(dimm: DimmConfig) -> Path:
    """What `nearstep rtl axdimm_module` writes for a configuration, to the byte."""
    return verilog_of(f"{TOP} {digest(dimm)}", lambda: generate.verilog(TOP, config=dimm))


def whole_library(dimm: DimmConfig) -> Path:
    """The shared library of `dimm.cpp` around the shipped top, Verilated as one object.

    Its functional units are instances of a module that is Verilated once.
    """
    names = [f"{TOP}.channel{number}" for number in range(dimm.channels)]
    return verilate_library(
        "axdimm_whole",
        [
            Model(
                top=TOP,
                verilog=shipped_verilog(dimm),
                prefix="Vmodule",
                blocks=[UNIT_MODULE],
                visible=[
                    *((name, "o_kernel_reset") for name in names),
                    *((f"{name}.memory", "o_acceleration") for name in names),
                ],
            )
        ],
        [HARNESS],
        common=[DRAM_MODELS],
        defines={"NEARSTEP_WHOLE": 1, "NEARSTEP_CHANNELS": dimm.channels},
    )
