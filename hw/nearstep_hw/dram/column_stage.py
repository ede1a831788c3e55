"""Last stage of a beat: its column command."""

from amaranth import Elaboratable, Module, Mux, Signal
from amaranth.lib import enum, stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.dram.fabric import FabricTiming
from nearstep_hw.dram.hold import HoldLine
from nearstep_hw.dram.request import BeatLayout, of_rank, rank_select
from nearstep_spec.dram.geometry import DramGeometry


class Slot(enum.Enum, shape=3):
    """Use of the column slot of a cycle, or the reason why it is unused."""

    READ = 0
    WRITE = 1
    EMPTY = 2  # there is no beat
    ROW = 3  # the row of the next beat is not open yet
    BANK_GROUP = 4  # tCCD_L after the previous beat
    TURNAROUND = 5  # the data bus changes direction or rank
    SPACE = 6  # no space for read data: R stalls
    REFRESH = 7  # the rank is refreshed, or closed and opened for it


class ColumnStage(wiring.Component):
    """Issues the column commands in order, a cycle each, and keeps tCCD, tRTRS and the turnarounds.

    *Timing*: combinational from `i`.

    Parameters
    ----------
    timing, geometry : of the channel.
    id_width : bits of an AXI ID.

    Members
    -------
    i : beats; accepted with their command.
    i_opened : a row is opened in this cycle, for the next of the beats that `opens`.
    i_no_column : banks whose row was opened less than tRCD ago.
    o_read, o_write : the command is issued in this cycle.
    o_slot : use of the slot; never SPACE or REFRESH, which are not known here.
    """

    def __init__(self, timing: FabricTiming, geometry: DramGeometry, *, id_width: int) -> None:
        self.timing = timing
        self.geometry = geometry
        super().__init__(
            {
                "i": In(stream.Signature(BeatLayout(geometry, id_width=id_width))),
                "i_opened": In(1),
                "i_no_column": In(geometry.all_banks),
                "o_read": Out(1),
                "o_write": Out(1),
                "o_slot": Out(Slot),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        t, geometry, beat = self.timing, self.geometry, self.i.payload
        ranks, groups = geometry.ranks, geometry.ranks * geometry.bank_groups
        switch = t.column_to_column_other_rank
        other_read = {"other_read": t.read_to_write_other_rank, "other_write": switch}
        other_write = {"other_read": switch, "other_write": t.write_to_read_other_rank}
        if ranks == 1:
            other_read, other_write = {}, {}
        same_group = HoldLine(
            groups,
            {"column": t.column_to_column_same_group},
        )
        m.submodules.same_group = same_group
        m.submodules.no_write = no_write = HoldLine(ranks, {"read": t.read_to_write, **other_read})
        m.submodules.no_read = no_read = HoldLine(ranks, {"write": t.write_to_read, **other_write})
        m.submodules.no_read_group = no_read_group = HoldLine(
            groups, {"write": t.write_to_read_same_group}
        )
        bank_group = Signal(groups)
        own = rank_select(geometry, beat.bank)
        opened = Signal(range(geometry.all_banks + 1))  # rows that no beat has used yet
        row_closed = Signal()
        close = Signal()
        turns = Signal()
        go = Signal()

        m.d.comb += [
            bank_group.eq(1 << (beat.bank >> geometry.bank_bits)),
            row_closed.eq(
                (beat.opens & (opened == 0)) | (self.i_no_column & (1 << beat.bank)).any()
            ),
            close.eq((same_group.o_held & bank_group).any()),
            turns.eq(
                Mux(
                    beat.write,
                    of_rank(no_write.o_held, own),
                    of_rank(no_read.o_held, own) | (no_read_group.o_held & bank_group).any(),
                )
            ),
            go.eq(self.i.valid & (self.o_slot.as_value() <= Slot.WRITE.value)),
            self.i.ready.eq(go),
            self.o_read.eq(go & ~beat.write),
            self.o_write.eq(go & beat.write),
            same_group.i_column.eq(Mux(go, bank_group, 0)),
            no_write.i_read.eq(self.o_read if ranks == 1 else Mux(self.o_read, own, 0)),
            no_read.i_write.eq(self.o_write if ranks == 1 else Mux(self.o_write, own, 0)),
            no_read_group.i_write.eq(Mux(self.o_write, bank_group, 0)),
        ]
        if ranks > 1:
            for line in (no_write, no_read):
                m.d.comb += [
                    line.i_other_read.eq(Mux(self.o_read, ~own, 0)),
                    line.i_other_write.eq(Mux(self.o_write, ~own, 0)),
                ]
        m.d.sync += opened.eq(opened + self.i_opened - (go & beat.opens))
        with m.If(~self.i.valid):
            m.d.comb += self.o_slot.eq(Slot.EMPTY)
        with m.Elif(row_closed):
            m.d.comb += self.o_slot.eq(Slot.ROW)
        with m.Elif(turns):
            m.d.comb += self.o_slot.eq(Slot.TURNAROUND)
        with m.Elif(close):
            m.d.comb += self.o_slot.eq(Slot.BANK_GROUP)
        with m.Elif(beat.write):
            m.d.comb += self.o_slot.eq(Slot.WRITE)
        return m
