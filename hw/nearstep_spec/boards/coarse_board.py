"""Configuration of a board design: a COARSE device behind a serial link, with links to others."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Annotated, Any, Literal

from nearstep_spec.boards.board import BOARDS, Clock
from nearstep_spec.boards.design import BoardDesign
from nearstep_spec.coarse.config import PORTS, CoarseConfig
from nearstep_spec.coarse.lanes import PINS, round_trip_cycles
from nearstep_spec.coarse.registers import RETRY_CYCLES, device_maps
from nearstep_spec.codec import Nested, Option
from nearstep_spec.csr.model import RegisterMap
from nearstep_spec.updater.config import ConfigError

COARSE_OPTIONS: Mapping[str, Any] = MappingProxyType(
    {
        "groups": 1,
        "alus": 4,
        "entry_phits": 16,
        "buffer_entries": 4,
        "local_beats": 32,
        "chunks_ahead": 2,
        "queue_jobs": 2,
        "snapshot_pages": 16,
        "memory_bytes": 64 << 10,
        "wire_formats": ("fp32",),
    }
)
"""Default device of a board: fits an ECP5-85F."""

CLOCK = Clock(hz=25_000_000)
"""Clock that the device reaches, unlike those of a board with an SDRAM."""

CLOCK_BAUD = 1_000_000
"""Rate of the link to the host with this clock, which has no divisor near 3 Mbaud."""

MOST_MEMORY_BYTES = 256 << 10
"""Largest memory: part of the 416 KiB of block RAM of an ECP5-85F, to leave room for buffers."""

LINKED = tuple(name for name, board in BOARDS.items() if board.links)
"""Boards with enough pins for the links."""


@dataclass(frozen=True, kw_only=True)
class CoarseBoardConfig(BoardDesign):
    """Contents of a bitstream: a COARSE device whose local DRAM is block RAM, a serial link to the
    host, and links to two other boards, see `nearstep_spec.coarse.lanes`.

    Parameters
    ----------
    design : name of this design.
    board : name.
    clock_mhz : of the design; None: 25.
    baud : of the serial link; None: that of the board, with 25 MHz 1,000,000.
    device : the device.

    Raises
    ------
    ConfigError : with the value and what is allowed.
    """

    design: Annotated[Literal["coarse"], Option(meaning="what a board holds")] = "coarse"
    board: Annotated[str, Option(meaning="board that the design is for", choices=LINKED)] = (
        "ulx3s_85f"
    )
    clock_mhz: Annotated[
        int | None,
        Option(
            meaning="clock of the design, MHz",
            allowed="25, or one of the board's",
            unset="25",
        ),
    ] = None
    baud: Annotated[
        int | None,
        Option(
            meaning="bits a second of the link to the host",
            allowed="from 9600 to a quarter of the clock",
            unset="that of the board; with 25 MHz 1000000",
        ),
    ] = None
    device: Annotated[CoarseConfig, Nested(defaults=COARSE_OPTIONS, omit=("rules", "exact"))] = (
        field(default_factory=lambda: CoarseConfig(**COARSE_OPTIONS))
    )

    def __post_init__(self) -> None:
        self.check_board()
        if not self.described.links:
            raise ConfigError(
                f"board must have {2 * PORTS * PINS} pins for links, as {', '.join(LINKED)}, "
                f"not {self.board!r}"
            )
        if self.device.memory_bytes > MOST_MEMORY_BYTES:
            raise ConfigError(
                f"memory_bytes must be at most {MOST_MEMORY_BYTES}, in block RAM, "
                f"not {self.device.memory_bytes!r}"
            )
        cycles = round_trip_cycles(self.device.entry_phits)
        if cycles > RETRY_CYCLES:
            raise ConfigError(
                f"entry_phits must be fewer: an acknowledgement may take {cycles} cycles on the "
                f"pins, and after {RETRY_CYCLES} a device sends again; "
                f"not {self.device.entry_phits!r}"
            )

    @property
    def clocks(self) -> tuple[Clock, ...]:
        """Valid clocks of the design; the first is the default."""
        return (CLOCK, *BOARDS[self.board].clocks)

    @property
    def link_baud(self) -> int:
        """Bits a second of the link, as a number."""
        if self.baud is None and self.described.clock == CLOCK:
            return CLOCK_BAUD
        return super().link_baud

    @property
    def family(self) -> str:
        """Family of the device, which selects the host's driver."""
        return "coarse"

    @property
    def memory(self) -> Literal["dram", "blockram"]:
        """Block RAM alone."""
        return "blockram"

    @property
    def inner(self) -> CoarseConfig:
        """Configuration of the device."""
        return self.device

    @property
    def memory_bytes(self) -> int:
        """Size of the memory, a power of two."""
        return self.device.memory_bytes

    def maps(self) -> Mapping[str, tuple[int, RegisterMap]]:
        """Register blocks of the device."""
        return device_maps(self.device)
