"""Accesses to memory of the host: a line is read, a beat is written."""

from amaranth import Elaboratable, Module, Signal, unsigned
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.axi.signature import (
    Axi4ReadSignature,
    Axi4WriteSignature,
    BurstType,
    Response,
)
from nearstep_hw.nvme.layout import ADDRESS_BITS, BEAT_BITS
from nearstep_spec.nvme import ENTRY_BYTES

BEAT_BYTES = BEAT_BITS // 8
LINE_BEATS = ENTRY_BYTES // BEAT_BYTES
BEAT_SHIFT = exact_log2(BEAT_BYTES)
PORT = {"address_width": ADDRESS_BITS, "data_width": BEAT_BITS}

LineRequest = data.StructLayout(
    {
        "beat": unsigned(ADDRESS_BITS - BEAT_SHIFT),
        "last": unsigned(exact_log2(LINE_BEATS)),
    }
)
"""Number of the first beat, and number in its line of the last one, which is not before it."""

BeatRequest = data.StructLayout(
    {
        "beat": unsigned(ADDRESS_BITS - BEAT_SHIFT),
        "data": unsigned(BEAT_BITS),
        "bytes": unsigned(BEAT_BYTES),
    }
)
"""Number of a beat, its data, and a bit for each of its bytes, 1 to write it."""


class LineRead(wiring.Component):
    """Reads beats of a line of 64 bytes, each to its place in `line`, one request at a time.

    *Timing*: ARVALID one cycle after the request was taken; `o_done` one cycle after the last beat.

    Members
    -------
    i : requests; taken when no other is under way.
    bus : AR and R, one ID; RREADY is always high.
    line : the beats read, until the next request is taken.
    o_done : the request has ended.
    o_failed : with `o_done`: a response was not OKAY.
    o_idle : nothing is under way.
    """

    i: In(stream.Signature(LineRequest))
    bus: Out(Axi4ReadSignature(**PORT, id_width=1))
    line: Out(8 * ENTRY_BYTES)
    o_done: Out(1)
    o_failed: Out(1)
    o_idle: Out(1)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        ar, r, asked = self.bus.ar, self.bus.r, self.i.payload
        busy = Signal()
        place = Signal(exact_log2(LINE_BEATS))
        beat, length = Signal(ADDRESS_BITS - BEAT_SHIFT), Signal(exact_log2(LINE_BEATS))
        m.d.comb += [
            self.o_idle.eq(~busy),
            self.i.ready.eq(~busy),
            ar.payload.addr.eq(beat << BEAT_SHIFT),
            ar.payload.len.eq(length),
            ar.payload.size.eq(BEAT_SHIFT),
            ar.payload.burst.eq(BurstType.INCR),
            r.ready.eq(1),
        ]
        m.d.sync += self.o_done.eq(r.valid & r.payload.last)
        with m.If(ar.ready):
            m.d.sync += ar.valid.eq(0)
        with m.If(r.valid):
            m.d.sync += [
                self.line.word_select(place, BEAT_BITS).eq(r.payload.data),
                place.eq(place + 1),
                self.o_failed.eq(self.o_failed | (r.payload.resp != Response.OKAY)),
            ]
            with m.If(r.payload.last):
                m.d.sync += busy.eq(0)
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [
                busy.eq(1),
                ar.valid.eq(1),
                beat.eq(asked.beat),
                length.eq(asked.last - asked.beat[: len(place)]),
                place.eq(asked.beat),
                self.o_failed.eq(0),
            ]
        return m


class BeatWrite(wiring.Component):
    """Writes bytes of a beat, one request at a time.

    *Timing*: AWVALID and WVALID one cycle after the request was taken; `o_done` with BVALID.

    Members
    -------
    i : requests; taken when no other is under way.
    bus : AW, W and B, one ID; BREADY is always high.
    o_done : the request has ended.
    o_failed : with `o_done`: the response was not OKAY.
    o_idle : nothing is under way.
    """

    i: In(stream.Signature(BeatRequest))
    bus: Out(Axi4WriteSignature(**PORT, id_width=1))
    o_done: Out(1)
    o_failed: Out(1)
    o_idle: Out(1)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        aw, w, b = self.bus.aw, self.bus.w, self.bus.b
        busy, asked = Signal(), Signal(BeatRequest)
        m.d.comb += [
            self.o_idle.eq(~busy),
            self.i.ready.eq(~busy),
            aw.payload.addr.eq(asked.beat << BEAT_SHIFT),
            aw.payload.size.eq(BEAT_SHIFT),
            aw.payload.burst.eq(BurstType.INCR),
            w.payload.data.eq(asked.data),
            w.payload.strb.eq(asked.bytes),
            w.payload.last.eq(1),
            b.ready.eq(1),
            self.o_done.eq(b.valid),
            self.o_failed.eq(b.valid & (b.payload.resp != Response.OKAY)),
        ]
        for channel in (aw, w):
            with m.If(channel.ready):
                m.d.sync += channel.valid.eq(0)
        with m.If(b.valid):
            m.d.sync += busy.eq(0)
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [busy.eq(1), aw.valid.eq(1), w.valid.eq(1), asked.eq(self.i.payload)]
        return m
