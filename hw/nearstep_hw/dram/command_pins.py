"""Registers of the command pins."""

from amaranth import Elaboratable, Module, Mux, Value
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
from nearstep_hw.dram.request import any_rank, rank_select
from nearstep_spec.dram.command import ALL_BANKS, Command, encode
from nearstep_spec.dram.geometry import DramGeometry
from nearstep_spec.dram.timing import BURST_LENGTH


class CommandPins(wiring.Component):
    """Drives the pins of each phase from the commands of a cycle.

    Banks are numbers among all banks of the channel: rank, bank group, bank, from the high bits.

    *Timing*: on the pins one cycle after the input.

    Parameters
    ----------
    geometry : of the channel.

    Members
    -------
    i_column, i_write, i_column_bank, i_column_address : column command; the address counts bursts.
    i_activate, i_activate_bank, i_activate_row : activate.
    i_refresh, i_calibrate : REF or ZQCS of a rank, a bit for each, in place of an activate.
    i_precharge, i_precharge_bank : precharge one bank.
    i_precharge_all : precharge all banks of a rank, a bit for each, in place of one bank.
    p0, p1, p2, p3 : pins.
    """

    def __init__(self, geometry: DramGeometry) -> None:
        self.geometry = geometry
        super().__init__(
            {
                "i_column": In(1),
                "i_write": In(1),
                "i_column_bank": In(range(geometry.all_banks)),
                "i_column_address": In(geometry.burst_column_bits),
                "i_activate": In(1),
                "i_activate_bank": In(range(geometry.all_banks)),
                "i_activate_row": In(geometry.row_bits),
                "i_refresh": In(geometry.ranks),
                "i_calibrate": In(geometry.ranks),
                "i_precharge": In(1),
                "i_precharge_bank": In(range(geometry.all_banks)),
                "i_precharge_all": In(geometry.ranks),
                **{f"p{phase}": Out(CommandSignature(geometry.ranks)) for phase in range(PHASES)},
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        column = getattr(self, f"p{COLUMN_PHASE}")
        row = getattr(self, f"p{ACTIVATE_PHASE}")
        precharge = getattr(self, f"p{PRECHARGE_PHASE}")
        bank_bits = self.geometry.bank_bits
        rank_at = bank_bits + self.geometry.bank_group_bits
        first_column = self.i_column_address << exact_log2(BURST_LENGTH)

        for pins, bank in (
            (column, self.i_column_bank),
            (row, self.i_activate_bank),
            (precharge, self.i_precharge_bank),
        ):
            m.d.sync += [pins.ba.eq(bank[:bank_bits]), pins.bg.eq(bank[bank_bits:rank_at])]
        m.d.sync += [
            column.cs_n.eq(~self._select(self.i_column, self.i_column_bank)),
            row.cs_n.eq(
                ~(
                    self._select(self.i_activate, self.i_activate_bank)
                    | self.i_refresh
                    | self.i_calibrate
                )
            ),
            row.act_n.eq(any_rank(self.i_refresh | self.i_calibrate)),
            precharge.cs_n.eq(
                ~(self._select(self.i_precharge, self.i_precharge_bank) | self.i_precharge_all)
            ),
        ]
        with m.If(self.i_write):
            m.d.sync += column.address.eq(encode(Command.WR).address | first_column)
        with m.Else():
            m.d.sync += column.address.eq(encode(Command.RD).address | first_column)
        with m.If(any_rank(self.i_refresh)):
            m.d.sync += row.address.eq(encode(Command.REF).address)
        with m.Elif(any_rank(self.i_calibrate)):
            m.d.sync += row.address.eq(encode(Command.ZQCS).address)
        with m.Else():
            m.d.sync += row.address.eq(self.i_activate_row)
        with m.If(any_rank(self.i_precharge_all)):
            m.d.sync += precharge.address.eq(encode(Command.PRE).address | ALL_BANKS)
        with m.Else():
            m.d.sync += precharge.address.eq(encode(Command.PRE).address)
        return m

    def _select(self, valid: Value, bank: Value) -> Value:
        """Return a bit for each rank: set for the rank of the bank, if `valid`."""
        if self.geometry.ranks == 1:
            return valid
        return Mux(valid, rank_select(self.geometry, bank), 0)
