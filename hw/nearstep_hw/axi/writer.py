"""Mover of writes of several streams, which issues a burst when all of its data is buffered."""

from collections.abc import Sequence

from amaranth import Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.axi.burst import BurstLayout, id_width
from nearstep_hw.axi.credits import BeatCredits
from nearstep_hw.axi.fault import BusFaultSignature
from nearstep_hw.axi.signature import Axi4WriteSignature, BurstType
from nearstep_hw.axi.write_data import WriteData
from nearstep_hw.axi.write_responses import WriteResponses


class WriteMover(wiring.Component):
    """Issues granted bursts on AW, sends their data on W in the order of AW, and tracks B.

    A burst is issued only when all its data are buffered, so W never waits for the producer. The
    AXI ID is the stream. BREADY is always high.

    *Timing*: AWVALID one cycle after a burst is taken, WVALID three cycles later or after earlier
    bursts, without waiting for AWREADY. A beat a cycle on W.

    Parameters
    ----------
    streams : number of streams.
    address_width : bits of a byte address.
    beat_bytes, burst_beats : bytes of a beat, and beats of the longest burst.
    buffer_beats : most buffered beats of a stream.
    bursts_ahead : most outstanding bursts of a stream, a power of two.
    own : streams with a credit and a tail of their own.
    quantized : streams of `own` in 8 bits.
    cut : registers in the decision to take a burst and after B, a cycle of latency each.

    Members
    -------
    bus : AW, W and B.
    i : granted bursts, in the order of issue.
    data : beats of each stream.
    i_credit : one more beat of every stream but those of `own` is buffered.
    i_credit_own : a bit for each of `own`, in order: the same for this stream. If `own` is not
        empty.
    i_tail : WSTRB of the last beat of each stream but those of `own`.
    i_tail_own, i_tail_quantized : WSTRB likewise for streams of `own`, and of `quantized`. If not
        empty.
    o_block_done : a bit for each stream: a block is written and acknowledged.
    fault : a burst got a response other than OKAY; with the burst's address.
    i_stop : takes no burst; issued bursts complete.
    o_idle : no burst is offered or outstanding, so no data are left to send.
    i_clear : clears credits and faults; only when `o_idle`.
    """

    def __init__(
        self,
        *,
        streams: int,
        address_width: int,
        beat_bytes: int,
        burst_beats: int,
        buffer_beats: int,
        bursts_ahead: int,
        own: Sequence[int] = (),
        quantized: Sequence[int] = (),
        cut: bool = False,
    ) -> None:
        self.cut = cut
        self.streams = streams
        self.address_width = address_width
        self.beat_bytes = beat_bytes
        self.burst_beats = burst_beats
        self.buffer_beats = buffer_beats
        self.bursts_ahead = bursts_ahead
        self.own = tuple(own)
        self.quantized = tuple(quantized)
        self.layout = BurstLayout(
            streams=streams, address_width=address_width, burst_beats=burst_beats
        )
        super().__init__(
            {
                "bus": Out(
                    Axi4WriteSignature(
                        address_width=address_width,
                        data_width=8 * beat_bytes,
                        id_width=id_width(streams),
                    )
                ),
                "i": In(stream.Signature(self.layout)),
                "data": In(stream.Signature(8 * beat_bytes)).array(streams),
                "i_credit": In(1),
                "i_tail": In(beat_bytes),
                **(
                    {"i_credit_own": In(len(self.own)), "i_tail_own": In(beat_bytes)}
                    if self.own
                    else {}
                ),
                **({"i_tail_quantized": In(beat_bytes)} if self.quantized else {}),
                "o_block_done": Out(streams),
                "fault": Out(BusFaultSignature(streams=streams, address_width=address_width)),
                "i_stop": In(1),
                "o_idle": Out(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.ready_beats = ready_beats = BeatCredits(
            streams=self.streams,
            capacity=self.buffer_beats,
            burst_beats=self.burst_beats,
            initial=0,
            own=self.own,
        )
        m.submodules.w = w = WriteData(
            self.layout,
            streams=self.streams,
            beat_bytes=self.beat_bytes,
            bursts_ahead=self.bursts_ahead,
            own=self.own,
            quantized=self.quantized,
        )
        if self.quantized:
            m.d.comb += w.i_tail_quantized.eq(self.i_tail_quantized)
        if self.own:
            m.d.comb += [
                ready_beats.i_credit_own.eq(self.i_credit_own),
                w.i_tail_own.eq(self.i_tail_own),
            ]
        m.submodules.responses = responses = WriteResponses(
            self.layout,
            streams=self.streams,
            address_width=self.address_width,
            bursts_ahead=self.bursts_ahead,
        )
        aw, burst = self.bus.aw, self.i.payload
        announced = Signal(self.layout, reset_less=True)
        issue = Signal()
        may = Signal()  # the condition stays true until the burst is taken
        enough = ready_beats.o_enough & responses.o_room
        if self.cut:
            m.d.sync += may.eq(enough & self.i.valid & ~issue)
        else:
            m.d.comb += may.eq(enough)

        for mine, its in zip(self.data, w.data, strict=True):
            wiring.connect(m, wiring.flipped(mine), its)
        wiring.connect(m, w.o, wiring.flipped(self.bus.w))
        wiring.connect(m, wiring.flipped(self.bus.b), responses.b)
        to = m.d.sync if self.cut else m.d.comb
        to += self.o_block_done.eq(responses.o_block_done)
        for name in responses.fault.signature.members:
            to += getattr(self.fault, name).eq(getattr(responses.fault, name))
        m.d.comb += [
            ready_beats.i_credit.eq(self.i_credit),
            ready_beats.i_stream.eq(burst.stream),
            ready_beats.i_beats.eq(burst.beats),
            ready_beats.i_take.eq(issue),
            responses.i_burst.eq(burst),
            responses.i_issue.eq(issue),
            self.i.ready.eq(may & ~self.i_stop & ~aw.valid & w.i.ready),
            issue.eq(self.i.valid & self.i.ready),
            aw.payload.id.eq(announced.stream),
            aw.payload.addr.eq(announced.address),
            aw.payload.len.eq(announced.beats - 1),
            aw.payload.size.eq(exact_log2(self.beat_bytes)),
            aw.payload.burst.eq(BurstType.INCR),
            # Not with AWREADY: a subordinate may wait for WVALID before it takes the address.
            w.i.valid.eq(issue),
            w.i.payload.eq(burst),
            w.i_tail.eq(self.i_tail),
            self.o_idle.eq(~aw.valid & responses.o_idle),
        ]
        with m.If(issue):
            m.d.sync += [aw.valid.eq(1), announced.eq(burst)]
        with m.Elif(aw.ready):
            m.d.sync += aw.valid.eq(0)
        return ResetInserter(self.i_clear)(m)
