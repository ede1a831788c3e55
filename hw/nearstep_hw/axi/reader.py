"""Mover of reads of several streams, with reserved landing space."""

from collections.abc import Sequence

from amaranth import Array, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.axi.burst import BurstLayout, id_width
from nearstep_hw.axi.credits import BeatCredits
from nearstep_hw.axi.fault import BusFaultSignature
from nearstep_hw.axi.signature import Axi4ReadSignature, BurstType, Response


class ReadMover(wiring.Component):
    """Issues granted bursts on AR and distributes the beats of R to their streams.

    RREADY is always high: a burst is issued only with landing space reserved for all of it. The AXI
    ID is the stream; beats of one ID are in order, beats of different IDs in any order.

    *Timing*: ARVALID one cycle after a burst is taken, a burst a cycle. R is combinational.

    Parameters
    ----------
    streams : number of streams.
    address_width : bits of a byte address.
    beat_bytes, burst_beats : bytes of a beat, and beats of the longest burst.
    landing_beats : landing space of each stream.
    bursts_ahead : most bursts outstanding.
    own : streams with a credit of their own.
    cut : a register in the decision to take a burst, a cycle of latency.

    Members
    -------
    bus : AR and R.
    i : granted bursts, in the order of issue.
    i_base : byte address of each array, for the address of an error.
    i_credit : one beat of every stream but those of `own` has left its landing space.
    i_credit_own : a bit for each of `own`, in order: the same for this stream. If `own` is not
        empty.
    o_beat : a bit for each stream: `data` of `bus.r` is the stream's next beat.
    fault : a beat got a response other than OKAY; with the address of its burst.
    i_stop : takes no burst; issued bursts complete.
    o_idle : no burst is outstanding or offered on AR.
    i_clear : frees all landing space; only when `o_idle`.
    """

    def __init__(
        self,
        *,
        streams: int,
        address_width: int,
        beat_bytes: int,
        burst_beats: int,
        landing_beats: int,
        bursts_ahead: int,
        own: Sequence[int] = (),
        cut: bool = False,
    ) -> None:
        self.cut = cut
        self.streams = streams
        self.beat_bytes = beat_bytes
        self.burst_beats = burst_beats
        self.landing_beats = landing_beats
        self.bursts_ahead = bursts_ahead
        self.own = tuple(own)
        self.beat_address_width = address_width - exact_log2(beat_bytes)
        layout = BurstLayout(streams=streams, address_width=address_width, burst_beats=burst_beats)
        super().__init__(
            {
                "bus": Out(
                    Axi4ReadSignature(
                        address_width=address_width,
                        data_width=8 * beat_bytes,
                        id_width=id_width(streams),
                    )
                ),
                "i": In(stream.Signature(layout)),
                "i_base": In(address_width).array(streams),
                "i_credit": In(1),
                **({"i_credit_own": In(len(self.own))} if self.own else {}),
                "o_beat": Out(streams),
                "fault": Out(BusFaultSignature(streams=streams, address_width=address_width)),
                "i_stop": In(1),
                "o_idle": Out(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.space = space = BeatCredits(
            streams=self.streams,
            capacity=self.landing_beats,
            burst_beats=self.burst_beats,
            initial=self.landing_beats,
            own=self.own,
        )
        if self.own:
            m.d.comb += space.i_credit_own.eq(self.i_credit_own)
        ar, r = self.bus.ar, self.bus.r
        burst, beat, fault = self.i.payload, r.payload, self.fault
        asked = Signal.like(ar.payload)
        outstanding = Signal(range(self.bursts_ahead + 1))
        width, streams = self.beat_address_width, range(self.streams)
        landed = Array(Signal(width, name=f"landed{i}") for i in streams)
        landing = Array(Signal(width, name=f"landing{i}") for i in streams)  # start of the burst
        issue = Signal()
        ends = Signal()
        may = Signal()  # there is space, which cannot decrease before the burst is taken
        enough = space.o_enough & (outstanding != self.bursts_ahead)
        if self.cut:
            m.d.sync += may.eq(enough & self.i.valid & ~issue)
        else:
            m.d.comb += may.eq(enough)

        m.d.comb += [
            space.i_stream.eq(burst.stream),
            space.i_beats.eq(burst.beats),
            space.i_credit.eq(self.i_credit),
            self.i.ready.eq(may & ~self.i_stop & (~ar.valid | ar.ready)),
            issue.eq(self.i.valid & self.i.ready),
            space.i_take.eq(issue),
            ar.payload.id.eq(asked.id),
            ar.payload.addr.eq(asked.addr),
            ar.payload.len.eq(asked.len),
            ar.payload.size.eq(exact_log2(self.beat_bytes)),
            ar.payload.burst.eq(BurstType.INCR),
            r.ready.eq(1),
            ends.eq(r.valid & beat.last),
            self.o_beat.eq(Mux(r.valid, 1 << beat.id, 0)),
            self.o_idle.eq((outstanding == 0) & ~ar.valid),
            fault.valid.eq(r.valid & (beat.resp != Response.OKAY)),
            fault.stream.eq(beat.id),
            fault.response.eq(beat.resp),
            fault.address.eq(Array(self.i_base)[beat.id] + landing[beat.id] * self.beat_bytes),
        ]
        with m.If(issue):
            m.d.sync += [
                ar.valid.eq(1),
                asked.id.eq(burst.stream),
                asked.addr.eq(burst.address),
                asked.len.eq(burst.beats - 1),
            ]
        with m.Elif(ar.ready):
            m.d.sync += ar.valid.eq(0)
        m.d.sync += outstanding.eq(outstanding + issue - ends)
        with m.If(r.valid):
            m.d.sync += landed[beat.id].eq(landed[beat.id] + 1)
        with m.If(ends):
            m.d.sync += landing[beat.id].eq(landed[beat.id] + 1)
        return ResetInserter(self.i_clear)(m)
