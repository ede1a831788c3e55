"""Expansion of bursts into beats with DRAM addresses."""

from amaranth import Cat, Elaboratable, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.dram.request import BEAT_SHIFT, PAGE_BEATS, BeatLayout, BurstLayout
from nearstep_spec.dram.address import AddressMapping


class BurstExpander(wiring.Component):
    """Outputs the beats of bursts, in order.

    *Timing*: the first beat one cycle after its burst was accepted, then a beat a cycle; the next
    burst is accepted with the last beat.

    Parameters
    ----------
    mapping : address mapping.
    id_width : bits of an AXI ID.

    Members
    -------
    i : bursts.
    o : beats, with `opens` 0.
    """

    def __init__(self, mapping: AddressMapping, *, id_width: int) -> None:
        self.mapping = mapping
        super().__init__(
            {
                "i": In(stream.Signature(BurstLayout(mapping.geometry, id_width=id_width))),
                "o": Out(stream.Signature(BeatLayout(mapping.geometry, id_width=id_width))),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        burst = Signal(self.i.payload.shape())
        beat = self.o.payload
        page_bits = exact_log2(PAGE_BEATS)
        rank = self.mapping.rank
        at, above = (bit - BEAT_SHIFT for bit in (rank.shift, rank.shift + rank.width))
        inside = Cat(burst.address[:at], burst.address[above:]) if rank.width else burst.address
        place = {
            word: inside[field.shift - BEAT_SHIFT :][: field.width]
            for word, field in self.mapping.fields.items()
        }
        m.d.comb += [
            self.i.ready.eq(~self.o.valid | (self.o.ready & beat.last)),
            beat.write.eq(burst.write),
            beat.id.eq(burst.id),
            beat.last.eq(burst.last == 0),
            beat.bank.eq(Cat(place["bank"], place["bankgroup"], burst.address[at:above])),
            beat.row.eq(place["row"]),
            beat.column.eq(place["column"]),
        ]
        with m.If(self.i.ready):
            m.d.sync += [self.o.valid.eq(self.i.valid), burst.eq(self.i.payload)]
        with m.Elif(self.o.ready):
            m.d.sync += [
                burst.address[:page_bits].eq(burst.address[:page_bits] + 1),
                burst.last.eq(burst.last - 1),
            ]
        return m
