"""Base of the configurations of board designs."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

from nearstep_spec.boards.board import BOARDS, Board, Clock
from nearstep_spec.csr.model import RegisterMap
from nearstep_spec.updater.config import ConfigError

MHZ = 1_000_000
CLOCKS_A_BIT = 4  # minimum, for the receiver to sample the middle of a bit


class BoardDesign(Protocol):
    """A board with a device behind a serial link, and a memory.

    Attributes
    ----------
    family : family of the device, which selects the host's driver.
    board : name.
    memory : the DRAM of the board behind LiteDRAM, or block RAM alone.
    clock_mhz : of the design; None: the first of the board's clocks.
    baud : of the link; None: that of the board.
    inner : configuration of the device.
    memory_bytes : size of the memory, a power of two.
    """

    @property
    def family(self) -> str: ...
    @property
    def board(self) -> str: ...
    @property
    def memory(self) -> Literal["dram", "blockram"]: ...
    @property
    def clock_mhz(self) -> int | None: ...
    @property
    def baud(self) -> int | None: ...
    @property
    def inner(self) -> Any: ...
    @property
    def memory_bytes(self) -> int: ...

    def maps(self) -> Mapping[str, tuple[int, RegisterMap]]:
        """Register blocks of the device: name to offset in bytes and register map."""
        ...

    @property
    def clocks(self) -> tuple[Clock, ...]:
        """Valid clocks of the design; the first is the default."""
        return BOARDS[self.board].clocks

    @property
    def described(self) -> Board:
        """The board, with the clock of the design."""
        board = replace(BOARDS[self.board], clocks=self.clocks)
        return board if self.clock_mhz is None else board.at(self.clock_mhz * MHZ)

    @property
    def link_baud(self) -> int:
        """Bits a second of the link, as a number."""
        return self.described.baud if self.baud is None else self.baud

    def check_board(self) -> None:
        """Raise `ConfigError` unless board, clock and rate of the link fit each other."""
        if self.board not in BOARDS:
            raise ConfigError(f"board must be one of {tuple(BOARDS)}, not {self.board!r}")
        clocks = [clock.hz // MHZ for clock in self.clocks]
        if self.clock_mhz is not None and self.clock_mhz not in clocks:
            raise ConfigError(
                f"clock_mhz of {self.board} must be one of {clocks}, not {self.clock_mhz!r}"
            )
        most = self.described.system_hz // CLOCKS_A_BIT
        if not 9600 <= self.link_baud <= most:
            raise ConfigError(f"baud must be 9600 to {most}, not {self.baud!r}")
