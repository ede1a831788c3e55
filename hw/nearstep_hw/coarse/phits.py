"""Conversion between phits of a link and beats of the ALUs."""

from amaranth import Cat, Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.coarse.entry import SentLayout
from nearstep_hw.coarse.wire import PHIT_BITS, EntryPhit
from nearstep_hw.stream.gearbox import StreamPack, StreamSplit

_HALF = PHIT_BITS // 2


class ReceiveBeats(wiring.Component):
    """Converts received phits to beats: several phits to a beat, or half a phit.

    *Timing*: a phit or a beat a cycle, whichever are more; one cycle of latency after the
    last phit of a beat.

    Parameters
    ----------
    alus : elements of a beat.

    Members
    -------
    i : phits.
    o : beats; elements of 16 bits in the lower half.
    i_halves : elements have 16 bits; else 32.
    i_clear : clears all state.
    """

    def __init__(self, alus: int) -> None:
        self.alus = alus
        super().__init__(
            {
                "i": In(stream.Signature(EntryPhit)),
                "o": Out(stream.Signature(32 * alus)),
                "i_halves": In(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        beat_phits = 32 * self.alus // PHIT_BITS
        phit = self.i.payload
        if beat_phits > 1:
            gear = StreamPack(piece_width=PHIT_BITS, factor=beat_phits)
            m.d.comb += [gear.i_half.eq(self.i_halves), gear.i.payload.data.eq(phit.data)]
        else:
            # A piece is as wide as a beat: the second half of a phit is the second piece.
            gear = StreamSplit(piece_width=PHIT_BITS, factor=2)
            m.d.comb += [
                gear.i_half.eq(~self.i_halves),
                gear.i.payload.data.eq(Cat(phit.data, phit.data[_HALF:])),
            ]
        m.submodules.gear = gear
        m.d.comb += [
            gear.i.valid.eq(self.i.valid),
            self.i.ready.eq(gear.i.ready),
            self.o.valid.eq(gear.o.valid),
            self.o.payload.eq(gear.o.payload.data),
            gear.o.ready.eq(self.o.ready),
        ]
        return ResetInserter(self.i_clear)(m)


class SendPhits(wiring.Component):
    """Converts the beats of an entry to phits: several of a beat, or one of two beats.

    *Timing*: a phit or a beat a cycle, whichever are more; one cycle of latency after the
    beat, or the second one.

    Parameters
    ----------
    alus : elements of a beat.
    exact : beats may have `both` halves, if they have several phits.

    Members
    -------
    i : beats; elements of 16 bits in the lower half.
    o : phits.
    i_halves : elements have 16 bits; else 32.
    i_clear : clears all state.
    """

    def __init__(self, alus: int, *, exact: bool = False) -> None:
        self.alus = alus
        self.exact = exact
        super().__init__(
            {
                "i": In(stream.Signature(SentLayout(32 * alus, exact=exact))),
                "o": Out(stream.Signature(EntryPhit)),
                "i_halves": In(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        beat_phits = 32 * self.alus // PHIT_BITS
        phit = self.o.payload
        if beat_phits > 1:
            m.submodules.gear = gear = StreamSplit(piece_width=PHIT_BITS, factor=beat_phits)
            half = self.i_halves
            if self.exact:
                both = Signal()
                half &= ~both
                with m.If(gear.i.valid & gear.i.ready):
                    m.d.sync += both.eq(self.i.payload.both)
            m.d.comb += [gear.i_half.eq(half), phit.data.eq(gear.o.payload.data)]
        else:
            m.submodules.gear = gear = StreamPack(piece_width=PHIT_BITS, factor=2)
            word = gear.o.payload.data
            m.d.comb += [gear.i_half.eq(~self.i_halves), phit.data.eq(word[:PHIT_BITS])]
            with m.If(self.i_halves):
                m.d.comb += phit.data[_HALF:].eq(word.word_select(1, PHIT_BITS)[:_HALF])
        m.d.comb += [
            gear.i.valid.eq(self.i.valid),
            gear.i.payload.eq(self.i.payload),
            self.i.ready.eq(gear.i.ready),
            self.o.valid.eq(gear.o.valid),
            phit.last.eq(gear.o.payload.last),
            gear.o.ready.eq(self.o.ready),
        ]
        return ResetInserter(self.i_clear)(m)
