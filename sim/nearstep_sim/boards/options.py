"""Options of simulated boards in device names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from nearstep.backends.options import Family, Variant
from nearstep_sim.verilate.options import Seed, Units
from nearstep_spec.boards.coarse_board import CoarseBoardConfig
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.codec import Nested, Option, check_bounds
from nearstep_spec.updater.config import ConfigError

SIMULATED = ("sdr",)
"""Kinds of DRAM with a model of chip and pads."""


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
                f"there is no model of {kind}"
            )


MOST_BOARDS = 8


@dataclass(frozen=True, kw_only=True)
class SimulatedRingOptions:
    """Options of `sim:board?design=coarse`: boards in a ring."""

    boards: Annotated[CoarseBoardConfig, Nested()] = field(default_factory=CoarseBoardConfig)
    devices: Annotated[
        int, Option(meaning="boards, joined to a ring by cables", low=2, high=MOST_BOARDS)
    ] = 2
    ppm: Annotated[
        int,
        Option(
            meaning="parts per million by which the oscillator of a board is slower than that of "
            "the previous board",
            low=0,
            high=10_000,
        ),
    ] = 200
    corrupt: Annotated[
        float,
        Option(
            meaning="chance, for each transfer on a cable, that a pin has the wrong level",
            low=0,
            high=1,
        ),
    ] = 0.0
    seed: Seed = 1

    def __post_init__(self) -> None:
        check_bounds(self)


SIM = Family(
    "sim:board",
    (
        Variant(
            options=SimulatedBoardOptions,
            opens="nearstep_sim.boards.board:BoardBackend",
            summary="all of a board: UART bits, card, memory controller, SDRAM chip",
        ),
        Variant(
            options=SimulatedRingOptions,
            opens="nearstep_sim.boards.ring:RingBackend",
            summary="all of several boards with a COARSE device each, and the cables between them",
            when=("design", "coarse"),
        ),
    ),
)
