"""The library of a simulated card."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from nearstep_hw.reset import RegisteredReset
from nearstep_hw.smartssd.card import SmartssdCard
from nearstep_hw.verilog import to_verilog
from nearstep_sim.updater.library import device_library
from nearstep_sim.verilate.build import Model, verilog_of
from nearstep_spec.codec import digest
from nearstep_spec.smartssd.config import SmartssdConfig

HARNESS = Path(__file__).with_name("card.cpp")


def card_library(card: SmartssdConfig, *, trace: bool = False) -> Path:
    """The shared library of `card.cpp` for a configuration.

    It holds the units in RTL and the C++ kernel that can stand in for them.
    """
    one = replace(card, subgroup_elements=card.chunk_elements)  # the hardware does not know it
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
