"""First stage of a beat: precharge of a conflicting row."""

from amaranth import Cat, Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out

from nearstep_hw.dram.request import BeatLayout, RowLayout
from nearstep_spec.dram.geometry import DramGeometry


class PrechargeStage(wiring.Component):
    """Precharges the bank of a beat if another row is open in it and no earlier beat needs it.

    Tracks the row that each bank will have when the beat is issued, marks the beats whose row must
    be opened, and queues those rows. Beats pass in order: a beat that waits for its
    bank blocks the later ones.

    *Timing*: combinational; a beat a cycle, and at most one precharge.

    Parameters
    ----------
    geometry : of the channel.
    id_width : bits of an AXI ID.

    Members
    -------
    i, o : beats; `opens` is set at `o`.
    o_row : rows to open, in the order of the beats that need them.
    i_stop : no beat passes.
    i_used : banks that earlier beats still need.
    i_no_precharge : banks that must not be precharged yet.
    i_close : a bit for each rank: all its banks are precharged in this cycle; no beat passes.
    o_precharge : banks precharged in this cycle, by this stage.
    o_open : banks with an open row, now or after the earlier beats.
    """

    def __init__(self, geometry: DramGeometry, *, id_width: int) -> None:
        self.geometry = geometry
        beat = stream.Signature(BeatLayout(geometry, id_width=id_width))
        super().__init__(
            {
                "i": In(beat),
                "o": Out(beat),
                "o_row": Out(stream.Signature(RowLayout(geometry))),
                "i_stop": In(1),
                "i_used": In(geometry.all_banks),
                "i_no_precharge": In(geometry.all_banks),
                "i_close": In(geometry.ranks),
                "o_precharge": Out(geometry.all_banks),
                "o_open": Out(geometry.all_banks),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        beat = self.i.payload
        m.submodules.rows = rows = Memory(
            shape=self.geometry.row_bits, depth=self.geometry.all_banks, init=[]
        )
        write_port = rows.write_port()
        read_port = rows.read_port(domain="comb")
        bank = Signal(self.geometry.all_banks)
        closes = self.i_close if self.geometry.ranks == 1 else self.i_close.any()
        is_open = Signal()
        hit = Signal()
        free = Signal()
        go = Signal()

        m.d.comb += [
            bank.eq(1 << beat.bank),
            read_port.addr.eq(beat.bank),
            write_port.addr.eq(beat.bank),
            write_port.data.eq(beat.row),
            write_port.en.eq(go),
            is_open.eq((self.o_open & bank).any()),
            hit.eq(is_open & (read_port.data == beat.row)),
            free.eq(~is_open | ~((self.i_used | self.i_no_precharge) & bank).any()),
            self.o.payload.eq(beat),
            self.o.payload.opens.eq(~hit),
            self.o_row.payload.bank.eq(beat.bank),
            self.o_row.payload.row.eq(beat.row),
            go.eq(
                self.i.valid
                & self.o.ready
                & (hit | (free & self.o_row.ready))
                & ~self.i_stop
                & ~closes
            ),
            self.i.ready.eq(go),
            self.o.valid.eq(go),
            self.o_row.valid.eq(go & ~hit),
            self.o_precharge.eq(Mux(go & is_open & ~hit, bank, 0)),
        ]
        with m.If(closes):
            kept = Cat(~each.replicate(self.geometry.banks) for each in self.i_close)
            m.d.sync += self.o_open.eq(0 if self.geometry.ranks == 1 else self.o_open & kept)
        with m.Elif(go):
            m.d.sync += self.o_open.eq(self.o_open | bank)
        return m
