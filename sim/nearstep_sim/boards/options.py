"""Options of simulated boards, as they stand in a device name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from nearstep.backends.options import Family, Variant
from nearstep_sim.verilate.options import Seed, Units
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.codec import Nested, check_bounds
from nearstep_spec.updater.config import ConfigError

SIMULATED = ("sdr",)
"""Kinds of DRAM whose chip and pads have a model."""


@dataclass(frozen=True, kw_only=True)
class SimulatedBoardOptions:
    """Options of `sim:board`."""

    design: Annotated[BoardConfig, Nested()] = field(default_factory=BoardConfig)
    fu: Units = "rtl"
    seed: Seed = 1

    def __post_init__(self) -> None:
        check_bounds(self)
        kind = self.design.described.memory
        if self.design.memory == "dram" and kind not in SIMULATED:
            raise ConfigError(
                f"memory must be 'blockram' in simulation of {self.design.board}, not 'dram': "
                f"of {kind} there is no model"
            )


SIM = Family(
    "sim:board",
    (
        Variant(
            options=SimulatedBoardOptions,
            opens="nearstep_sim.boards.board:BoardBackend",
            summary="all of a board: UART bits, card, memory controller, SDRAM chip",
        ),
    ),
)
