"""Channel W: data of the addressed bursts, in the order of their addresses."""

from collections.abc import Sequence

from amaranth import Array, Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.burst import BurstLayout
from nearstep_hw.axi.signature import WriteDataLayout
from nearstep_hw.stream.fifo import StreamFifo


class WriteData(wiring.Component):
    """Sends the data of each burst taken.

    *Timing*: WVALID four cycles after a burst is taken, then a beat a cycle, without a gap between
    bursts. WDATA, WSTRB and WLAST are registers.

    Parameters
    ----------
    layout : layout of a burst.
    streams : number of streams.
    beat_bytes : bytes of a beat.
    bursts_ahead : depth of the queue of bursts, a power of two.
    own : streams with a tail of their own.
    quantized : streams of `own` in 8 bits.

    Members
    -------
    i : bursts, in the order of their addresses.
    data : the beats of each stream; valid no later than their burst.
    i_tail : WSTRB of the last beat of each stream but those of `own`; all other beats are written
        in full.
    i_tail_own, i_tail_quantized : WSTRB likewise for streams of `own`, and of `quantized`. If not
        empty.
    o : channel W.
    i_clear : clears all state; only when no burst is left to send.
    """

    def __init__(
        self,
        layout: BurstLayout,
        *,
        streams: int,
        beat_bytes: int,
        bursts_ahead: int,
        own: Sequence[int] = (),
        quantized: Sequence[int] = (),
    ) -> None:
        self.layout = layout
        self.own = tuple(own)
        self.quantized = tuple(quantized)
        self.bursts_ahead = bursts_ahead
        super().__init__(
            {
                "i": In(stream.Signature(layout)),
                "data": In(stream.Signature(8 * beat_bytes)).array(streams),
                "i_tail": In(beat_bytes),
                **({"i_tail_own": In(beat_bytes)} if self.own else {}),
                **({"i_tail_quantized": In(beat_bytes)} if self.quantized else {}),
                "o": Out(stream.Signature(WriteDataLayout(data_width=8 * beat_bytes))),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.bursts = bursts = StreamFifo(self.layout, depth=self.bursts_ahead)
        burst = Signal(self.layout, reset_less=True)  # the burst being sent; beats counts down
        sending = Signal()
        last = Signal()
        load = Signal()
        beat = self.o.payload

        wiring.connect(m, wiring.flipped(self.i), bursts.i)
        m.d.comb += [
            last.eq(burst.beats == 1),
            load.eq(
                sending
                & Array(beats.valid for beats in self.data)[burst.stream]
                & (~self.o.valid | self.o.ready)
            ),
            bursts.o.ready.eq(~sending | (load & last)),
        ]
        with m.If(bursts.o.ready):
            m.d.sync += [burst.eq(bursts.o.payload), sending.eq(bursts.o.valid)]
        with m.Elif(load):
            m.d.sync += burst.beats.eq(burst.beats - 1)

        with m.If(load):
            m.d.sync += [
                self.o.valid.eq(1),
                beat.last.eq(last),
                beat.strb.eq(~0),
            ]
            with m.If(last & burst.run_last):
                m.d.sync += beat.strb.eq(self.i_tail)
                for number in self.own:
                    with m.If(burst.stream == number):
                        tail = (
                            self.i_tail_quantized if number in self.quantized else self.i_tail_own
                        )
                        m.d.sync += beat.strb.eq(tail)
        with m.Elif(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        for i, beats in enumerate(self.data):
            mine = burst.stream == i
            m.d.comb += beats.ready.eq(load & mine)
            with m.If(load & mine):
                m.d.sync += beat.data.eq(beats.payload)
        return ResetInserter(self.i_clear)(m)
