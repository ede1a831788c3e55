"""Options of every simulated device: how it is simulated, and the memory of one port."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from nearstep_spec.codec import Option, check_bounds

Units = Annotated[
    Literal["rtl", "native"],
    Option(
        meaning="functional units; rtl: Verilated; native: C++ of equal bits and cycles, faster"
    ),
]
Seed = Annotated[int, Option(meaning="of stalls and faults", low=0, high=(1 << 63) - 1)]
Trace = Annotated[
    str | None,
    Option(meaning="VCD of every signal; large and slow", allowed="a file to write", unset="none"),
]
Memory = Annotated[
    Literal["ideal", "halfduplex"],
    Option(
        meaning="ideal: a read and a write beat a cycle; halfduplex: one in all, 4 cycles to turn"
    ),
]


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """How a device is simulated whose memory is one port."""

    memory: Memory = "ideal"
    latency: Annotated[
        int | None,
        Option(
            meaning="cycles from the last address to the first beat, and from the last beat to the "
            "response of a write",
            low=1,
            high=1 << 16,
            unset="1 for ideal, 40 for halfduplex",
        ),
    ] = None
    fu: Units = "rtl"
    stall: Annotated[
        float,
        Option(
            meaning="share of cycles in which the memory stalls each of its channels",
            low=0,
            high=0.95,
        ),
    ] = 0.0
    seed: Seed = 1
    trace: Trace = None

    def __post_init__(self) -> None:
        check_bounds(self)
