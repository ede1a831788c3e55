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
MODULE, CHANNEL = "axdimm_module", "axdimm_channel"
"""The shipped tops: all channels behind one bus, and one channel."""


def dimm_library(dimm: DimmConfig, *, trace: bool = False) -> Path:
    """Build the shared library of `dimm.cpp`: any number of channels, each an object of one model.

    The library has the units in RTL and a C++ kernel that can replace them.
    """
    one = replace(dimm, channels=1)  # the channels are all the same
    shell = verilog_of(
        f"{CHANNEL} {digest(one)}",
        lambda: to_verilog(
            AxdimmChannel(dimm.kernel, dimm.timing, dimm.address_mapping, unit=None), CHANNEL
        ),
    )
    return device_library(
        "axdimm_dimm",
        Model(top=CHANNEL, verilog=shell, prefix="Vshell"),
        [HARNESS],
        dimm.kernel,
        trace,
        pairs_clock=False,
        common=[DRAM_MODELS],
    )


def shipped_verilog(dimm: DimmConfig, top: str = MODULE) -> Path:
    """Return the exact output of `nearstep rtl axdimm_module`, or `axdimm_channel`, for a
    configuration.
    """
    return verilog_of(f"rtl {top} {digest(dimm)}", lambda: generate.verilog(top, config=dimm))


def whole_library(dimm: DimmConfig, top: str = MODULE) -> Path:
    """Build the shared library of `dimm.cpp` around a shipped top, Verilated as one object.

    The functional units are instances of a module that is Verilated once.

    Parameters
    ----------
    dimm : configuration; of one channel if the top has one.
    top : `MODULE` or `CHANNEL`.
    """
    alone = top == CHANNEL
    names = [CHANNEL] if alone else [f"{MODULE}.channel{n}" for n in range(dimm.channels)]
    return verilate_library(
        "axdimm_whole",
        [
            Model(
                top=top,
                verilog=shipped_verilog(dimm, top),
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
        defines={
            "NEARSTEP_WHOLE": 1,
            "NEARSTEP_CHANNELS": dimm.channels,
            "NEARSTEP_CHANNEL_ALONE": int(alone),
        },
    )
