"""SDRAM chips, from data sheets."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from nearstep_sim.verilate.abi import structure

CSdramTiming = structure("models/sdram/sdram.hpp", "SdramTiming")
CSdramShape = structure("models/sdram/sdram.hpp", "SdramShape")
CSdramInjection = structure("models/sdram/sdram.hpp", "SdramInjection")

MILLISECOND = 10**9  # in picoseconds


@dataclass(frozen=True, kw_only=True)
class SdramChip:
    """A chip. Times are in picoseconds, named as JEDEC does.

    Attributes
    ----------
    tmrd_clocks : clocks from a load of the mode register to the next command.
    tlz, thz : from a clock edge until the chip drives its pins, and until it has stopped.
    tset, thold : times for which inputs must be stable before and after a clock edge.
    refresh : mean time between refreshes.
    power_up : from power to the first row that is opened.
    least_tck : clock with a CAS latency of two.
    """

    row_bits: int
    column_bits: int
    bank_bits: int
    trcd: int
    trp: int
    tras: int
    tras_most: int
    trc: int
    trfc: int
    trrd: int
    twr: int
    tmrd_clocks: int
    tac: int
    toh: int
    tlz: int
    thz: int
    tset: int
    thold: int
    refresh: int
    power_up: int
    least_tck: int
    source: str

    def timing(self, tck: int) -> CSdramTiming:
        """Return the timing for C++ at this clock."""
        names = [name for name, _ in CSdramTiming._fields_ if name != "tck"]
        return CSdramTiming(tck=tck, **{name: getattr(self, name) for name in names})

    def shape(self) -> CSdramShape:
        """Return the shape for C++."""
        return CSdramShape(
            row_bits=self.row_bits, column_bits=self.column_bits, bank_bits=self.bank_bits
        )


CHIPS: Mapping[str, SdramChip] = MappingProxyType(
    {
        "MT48LC16M16": SdramChip(
            row_bits=13,
            column_bits=9,
            bank_bits=2,
            trcd=20_000,
            trp=20_000,
            tras=44_000,
            tras_most=120_000_000,
            trc=66_000,
            trfc=66_000,
            trrd=15_000,
            twr=15_000,
            tmrd_clocks=2,
            tac=6_000,
            toh=2_700,
            tlz=1_000,
            thz=6_000,
            tset=1_500,
            thold=800,
            refresh=64 * MILLISECOND // 8192,
            power_up=100_000_000,
            least_tck=10_000,
            source="Micron MT48LC16M16A2, speed grade -75, CAS latency 2",
        )
    }
)
"""Chips by LiteDRAM's name."""
