"""Options of simulated boards, as they stand in a device name."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated

from nearstep.backends.options import Family, Variant
from nearstep_sim.verilate.options import Seed
from nearstep_spec.boards.config import BoardConfig
from nearstep_spec.codec import Nested, check_bounds


@dataclass(frozen=True, kw_only=True)
class SimulatedBoardOptions:
    """Options of `sim:board`."""

    design: Annotated[BoardConfig, Nested()] = field(default_factory=BoardConfig)
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
    ),
)
