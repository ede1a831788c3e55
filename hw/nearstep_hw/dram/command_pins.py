"""Puts the commands of a cycle on the pins of their phases."""

from amaranth import Elaboratable, Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.dram.dfi import (
    ACTIVATE_PHASE,
    COLUMN_PHASE,
    PHASES,
    PRECHARGE_PHASE,
    CommandSignature,
)
from nearstep_spec.dram.command import ALL_BANKS, Command, encode
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.timing import BURST_LENGTH


class CommandPins(wiring.Component):
    """Registers of the command pins.

    Banks are numbers among all banks, the bank group in the high bits.

    *Timing*: on the pins one cycle after the input.

    Parameters
    ----------
    geometry : of the channel.

    Members
    -------
    i_column, i_write, i_column_bank, i_column_address : column command; the address counts bursts.
    i_activate, i_activate_bank, i_activate_row : activate.
    i_refresh, i_calibrate : REF or ZQCS, in place of an activate.
    i_precharge, i_precharge_bank : precharge one bank.
    i_precharge_all : precharge all banks.
    p0, p1, p2, p3 : pins.
    """

    def __init__(self, geometry: DramGeometry) -> None:
        self.geometry = geometry
        super().__init__(
            {
                "i_column": In(1),
                "i_write": In(1),
                "i_column_bank": In(range(geometry.banks)),
                "i_column_address": In(geometry.burst_column_bits),
                "i_activate": In(1),
                "i_activate_bank": In(range(geometry.banks)),
                "i_activate_row": In(geometry.row_bits),
                "i_refresh": In(1),
                "i_calibrate": In(1),
                "i_precharge": In(1),
                "i_precharge_bank": In(range(geometry.banks)),
                "i_precharge_all": In(1),
                **{f"p{phase}": Out(CommandSignature()) for phase in range(PHASES)},
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        column = getattr(self, f"p{COLUMN_PHASE}")
        row = getattr(self, f"p{ACTIVATE_PHASE}")
        precharge = getattr(self, f"p{PRECHARGE_PHASE}")
        bank_bits = self.geometry.bank_bits
        first_column = self.i_column_address << exact_log2(BURST_LENGTH)

        for pins, bank in (
            (column, self.i_column_bank),
            (row, self.i_activate_bank),
            (precharge, self.i_precharge_bank),
        ):
            m.d.sync += [pins.ba.eq(bank[:bank_bits]), pins.bg.eq(bank[bank_bits:])]
        m.d.sync += [
            column.cs_n.eq(~self.i_column),
            row.cs_n.eq(~(self.i_activate | self.i_refresh | self.i_calibrate)),
            row.act_n.eq(self.i_refresh | self.i_calibrate),
            precharge.cs_n.eq(~(self.i_precharge | self.i_precharge_all)),
        ]
        with m.If(self.i_write):
            m.d.sync += column.address.eq(encode(Command.WR).address | first_column)
        with m.Else():
            m.d.sync += column.address.eq(encode(Command.RD).address | first_column)
        with m.If(self.i_refresh):
            m.d.sync += row.address.eq(encode(Command.REF).address)
        with m.Elif(self.i_calibrate):
            m.d.sync += row.address.eq(encode(Command.ZQCS).address)
        with m.Else():
            m.d.sync += row.address.eq(self.i_activate_row)
        with m.If(self.i_precharge_all):
            m.d.sync += precharge.address.eq(encode(Command.PRE).address | ALL_BANKS)
        with m.Else():
            m.d.sync += precharge.address.eq(encode(Command.PRE).address)
        return m
