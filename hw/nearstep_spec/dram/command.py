"""DDR4 commands and the pins that carry them, as plain data.

Ref: JESD79-4, "Command Truth Table".
"""

from enum import IntEnum
from typing import NamedTuple

__all__ = [
    "ADDRESS_BITS",
    "ALL_BANKS",
    "CAS_N",
    "DESELECT",
    "RAS_N",
    "WE_N",
    "Command",
    "Pins",
    "encode",
]

ADDRESS_BITS = 18  # A17 down to A0
ALL_BANKS = 1 << 10  # A10: all banks of a precharge; auto precharge of a column command
WE_N = 1 << 14  # shared with row address A14
CAS_N = 1 << 15
RAS_N = 1 << 16


class Command(IntEnum):
    """DDR4 commands.

    Mode registers must be set to the latencies of the timing table, see `mode_registers`.
    """

    NOP = 0
    ACT = 1
    RD = 2
    RDA = 3
    WR = 4
    WRA = 5
    PRE = 6
    PREA = 7
    REF = 8
    MRS = 9  # the register's number on the bank pins, its bits in place of a row
    ZQCS = 10
    ZQCL = 11


class Pins(NamedTuple):
    """One command slot. `cs_n` 1 deselects the rank; the other pins are then ignored."""

    cs_n: int = 1
    act_n: int = 1
    address: int = RAS_N | CAS_N | WE_N
    bg: int = 0
    ba: int = 0


DESELECT = Pins()

# With act_n high, RAS_n, CAS_n and WE_n on A16, A15 and A14.
_CODES = {
    Command.NOP: RAS_N | CAS_N | WE_N,
    Command.RD: RAS_N | WE_N,
    Command.RDA: RAS_N | WE_N | ALL_BANKS,
    Command.WR: RAS_N,
    Command.WRA: RAS_N | ALL_BANKS,
    Command.PRE: CAS_N,
    Command.PREA: CAS_N | ALL_BANKS,
    Command.REF: WE_N,
    Command.MRS: 0,
    Command.ZQCS: RAS_N | CAS_N,
    Command.ZQCL: RAS_N | CAS_N | ALL_BANKS,
}


def encode(
    command: Command, *, bank_group: int = 0, bank: int = 0, row: int = 0, column: int = 0
) -> Pins:
    """Encode the pins of a command. Coordinates that the command does not use are ignored."""
    if command is Command.NOP:
        return DESELECT
    if command is Command.ACT:
        return Pins(cs_n=0, act_n=0, address=row, bg=bank_group, ba=bank)
    address = _CODES[command]
    if command in (Command.RD, Command.RDA, Command.WR, Command.WRA):
        address |= column
    if command is Command.MRS:
        address |= row
    return Pins(cs_n=0, address=address, bg=bank_group, ba=bank)
