"""The libraries of simulated cards."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nearstep_hw.generate import modules, verilog
from nearstep_hw.reset import RegisteredReset
from nearstep_hw.smartssd.card import SmartssdCard
from nearstep_hw.verilog import to_verilog
from nearstep_sim.updater.library import device_library, whole_library
from nearstep_sim.verilate.build import Model, verilog_of
from nearstep_spec.codec import digest
from nearstep_spec.smartssd.config import SmartssdConfig

HARNESS = Path(__file__).with_name("card.cpp")
PCIE_HARNESS = Path(__file__).with_name("pcie_card.cpp")
TOP = "smartssd_card"
PCIE_TOP = "smartssd_pcie_card"
"""Generators of the cards as they are shipped, and the names of their modules."""


def card_library(card: SmartssdConfig, *, trace: bool = False) -> Path:
    """The shared library of `card.cpp` for a configuration.

    The library has the units in RTL and a C++ kernel that can replace them.
    """
    one = _of_hardware(card)
    shell = verilog_of(
        f"card_shell {digest(one)}",
        lambda: to_verilog(RegisteredReset(SmartssdCard(one, unit=None)), "card_shell"),
    )
    return device_library(
        "smartssd_card",
        Model(top="card_shell", verilog=shell, prefix="Vshell"),
        [HARNESS],
        card.kernel,
        trace,
        pairs_clock=bool(card.kernel.compression),
    )


def shipped_verilog(top: str, card: SmartssdConfig) -> Path:
    """Return the file that `nearstep rtl` writes for a configuration, with generator `top`."""
    one = _of_hardware(card)
    return verilog_of(f"{top} {digest(one)}", lambda: verilog(top, config=one))


def whole_card_library(card: SmartssdConfig, *, trace: bool = False) -> Path:
    """The shared library of `card.cpp` around the top as it is shipped, one Verilated object."""
    return _whole(TOP, HARNESS, card, trace)


def pcie_card_library(card: SmartssdConfig, *, trace: bool = False) -> Path:
    """The shared library of `pcie_card.cpp`: the top as it is shipped, as one Verilated object."""
    return _whole(PCIE_TOP, PCIE_HARNESS, card, trace)


def _whole(top: str, harness: Path, card: SmartssdConfig, trace: bool) -> Path:
    units = tuple(modules(top, config=_of_hardware(card)))
    verilog = shipped_verilog(top, card)
    return whole_library(top, verilog, [harness], card.kernel.beat_bytes, trace, units=units)


def _of_hardware(card: SmartssdConfig) -> SmartssdConfig:
    """Remove options that do not affect the hardware."""
    return replace(card, subgroup_elements=card.chunk_elements)
