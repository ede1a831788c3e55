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
PCIE_TOP = "smartssd_pcie_card"
"""Generator of the card as it is shipped, and the name of its module."""


def card_library(card: SmartssdConfig, *, trace: bool = False) -> Path:
    """The shared library of `card.cpp` for a configuration.

    It holds the units in RTL and the C++ kernel that can stand in for them.
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


def pcie_card_verilog(card: SmartssdConfig) -> Path:
    """What `nearstep rtl smartssd_pcie_card` writes for a configuration."""
    one = _of_hardware(card)
    return verilog_of(f"{PCIE_TOP} {digest(one)}", lambda: verilog(PCIE_TOP, config=one))


def pcie_card_library(card: SmartssdConfig, *, trace: bool = False) -> Path:
    """The shared library of `pcie_card.cpp`: the top as it is shipped, as one Verilated object."""
    return whole_library(
        PCIE_TOP,
        pcie_card_verilog(card),
        [PCIE_HARNESS],
        card.kernel.beat_bytes,
        trace,
        units=tuple(modules(PCIE_TOP, config=_of_hardware(card))),
    )


def _of_hardware(card: SmartssdConfig) -> SmartssdConfig:
    """Without what the hardware does not know."""
    return replace(card, subgroup_elements=card.chunk_elements)
