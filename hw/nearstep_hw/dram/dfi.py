"""DFI-style ports between a controller and a DDR4 PHY, several command phases a fabric cycle."""

from amaranth.lib.wiring import In, Out, Signature

from nearstep_spec.dram.command import ADDRESS_BITS, CAS_N, RAS_N, WE_N
from nearstep_spec.dram.geometry import BEAT_BYTES
from nearstep_spec.dram.latency import (
    HOST_DATA_BYTES,
    HOST_PHASES,
    PHASES,
    PHY_READ_DELAY,
    PHY_WRITE_DELAY,
    TPHY_RDLAT,
    TPHY_WRLAT,
    tphy_rdlat,
    tphy_wrlat,
)

__all__ = [
    "ACTIVATE_PHASE",
    "COLUMN_PHASE",
    "HOST_DATA_BYTES",
    "HOST_PHASES",
    "PHASES",
    "PHY_READ_DELAY",
    "PHY_WRITE_DELAY",
    "PRECHARGE_PHASE",
    "TPHY_RDLAT",
    "TPHY_WRLAT",
    "CommandSignature",
    "DfiSignature",
    "tphy_rdlat",
    "tphy_wrlat",
]

COLUMN_PHASE = 0
"""The phase of every column command of the controller. Its bursts are then a whole number of fabric
cycles apart: tCCD_S = 4 nCK is one cycle, tCCD_L = 5 nCK becomes 8 nCK, two cycles."""

ACTIVATE_PHASE = 1
"""ACT here meets its column command after exactly tRCD: 3 * 4 - 1 = 11 nCK."""

PRECHARGE_PHASE = 2
"""PRE here is tRTP after a read (4 + 2 = 6 nCK) and tRP before ACT (3 * 4 - 1 = 11 nCK)."""


class CommandSignature(Signature):
    """Command pins of one phase, seen from the controller.

    Parameters
    ----------
    ranks : that the pins reach.

    Members
    -------
    cs_n : a bit for each rank, 1 deselects it; a cycle without command has them high in every
        phase.
    act_n : 0 activates; `address` is then the row.
    address : A17 to A0. With `act_n` high A16, A15 and A14 are RAS_n, CAS_n and WE_n, and A10 is
        auto precharge or all banks.
    bg, ba : bank group and bank.

    Ref: JESD79-4, "Command Truth Table".
    """

    def __init__(self, ranks: int = 1) -> None:
        super().__init__(
            {
                "cs_n": Out(ranks, init=(1 << ranks) - 1),
                "act_n": Out(1, init=1),
                "address": Out(ADDRESS_BITS, init=RAS_N | CAS_N | WE_N),
                "bg": Out(2),
                "ba": Out(2),
            }
        )


class DfiSignature(Signature):
    """A DDR4 channel, seen from the controller.

    A port called `dfi` becomes `dfi__p0__cs_n` ... `dfi__rddata_valid`.

    *Timing*: data of a write command in fabric cycle n are on `wrdata` in cycle n + `TPHY_WRLAT`,
    with `wrdata_en`; data of a read command are on `rddata` in cycle n + `TPHY_RDLAT`, with
    `rddata_valid`. Neither depends on the phase of the command. Where a cycle carries less than a
    burst, the rest follows in the next cycle. Nothing stalls.

    Parameters
    ----------
    phases : command slots in a fabric cycle, the first in time is p0.
    data_bytes : data in a fabric cycle.
    ranks : of the channel.

    Members
    -------
    p<n> : command pins.
    wrdata, wrdata_en : byte 0 in the low bits.
    wrdata_mask : 1 leaves the byte in memory unchanged.
    rddata, rddata_valid : byte 0 in the low bits.
    """

    def __init__(
        self, *, phases: int = PHASES, data_bytes: int = BEAT_BYTES, ranks: int = 1
    ) -> None:
        self.phases = phases
        self.data_bytes = data_bytes
        self.ranks = ranks
        super().__init__(
            {
                **{f"p{phase}": Out(CommandSignature(ranks)) for phase in range(phases)},
                "wrdata": Out(8 * data_bytes),
                "wrdata_mask": Out(data_bytes),
                "wrdata_en": Out(1),
                "rddata": In(8 * data_bytes),
                "rddata_valid": In(1),
            }
        )
