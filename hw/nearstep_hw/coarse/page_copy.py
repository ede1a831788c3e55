"""Copies pages of memory."""

from amaranth import Array, Cat, Const, Elaboratable, Module, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.axi.signature import Axi4ReadSignature, Axi4WriteSignature, BurstType, Response
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_spec.coarse.config import BEAT_BYTES, BURST_BEATS, PAGE_BYTES

COPY_ID_WIDTH = 1
PAGE_BEATS = PAGE_BYTES // BEAT_BYTES
PAGE_BURSTS = PAGE_BEATS // BURST_BEATS
PAGES = 2  # buffered at once: a page is read while the previous one is written


class PageCopy(wiring.Component):
    """Copies pages through a buffer of two pages.

    *Timing*: a beat a cycle in each direction. AW of a burst is issued when all data of the burst
    are buffered.

    Parameters
    ----------
    address_width : bits of a byte address.

    Members
    -------
    read, write : to memory. RREADY and BREADY are always high.
    i_start : begins a page; only with `o_ready`, and after `o_loaded` of the previous page.
    i_from, i_to : first bytes of the pages; `i_from` is held until `o_loaded`.
    o_ready : the buffer has room for a page.
    o_loaded : the page is in the buffer, and may be overwritten in memory.
    o_busy : writes of pages are outstanding.
    o_written : pulse: a page is written and acknowledged.
    o_failed : pulse: a response other than OKAY, at the latest with the page's `o_written`.
    """

    def __init__(self, *, address_width: int) -> None:
        self.address_width = address_width
        widths = {
            "address_width": address_width,
            "data_width": 8 * BEAT_BYTES,
            "id_width": COPY_ID_WIDTH,
        }
        super().__init__(
            {
                "read": Out(Axi4ReadSignature(**widths)),
                "write": Out(Axi4WriteSignature(**widths)),
                "i_start": In(1),
                "i_from": In(address_width),
                "i_to": In(address_width),
                "o_ready": Out(1),
                "o_loaded": Out(1),
                "o_busy": Out(1),
                "o_written": Out(1),
                "o_failed": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.buffer = buffer = StreamFifo(8 * BEAT_BYTES, depth=PAGES * PAGE_BEATS)
        ar, r = self.read.ar, self.read.r
        aw, w, b = self.write.aw, self.write.w, self.write.b
        burst_bits = exact_log2(BURST_BEATS * BEAT_BYTES)
        beat_bits, index_bits = exact_log2(BURST_BEATS), exact_log2(PAGE_BURSTS)
        page_bits = exact_log2(PAGE_BYTES)
        asked = Signal(range(PAGE_BURSTS + 1), init=PAGE_BURSTS)
        landed = Signal(range(PAGE_BEATS + 1), init=PAGE_BEATS)
        sent = Signal(beat_bits)  # beats of a burst
        announced, answered = Signal(index_bits), Signal(index_bits)  # bursts of a page
        to_announce = Signal(range(PAGES * PAGE_BURSTS + 1))  # bursts buffered in full
        to_send = Signal.like(to_announce)
        pages = Signal(range(PAGES + 1))
        places = Array(Signal(self.address_width, name=f"place{i}") for i in range(PAGES))
        entered, leaving = Signal(range(PAGES)), Signal(range(PAGES))
        burst_landed, burst_announced, burst_sent = Signal(), Signal(), Signal()

        def place(page: Value, burst: Signal) -> Cat:
            return Cat(Const(0, burst_bits), burst[:index_bits], page[page_bits:])

        for address in (ar.payload, aw.payload):
            m.d.comb += [
                address.len.eq(BURST_BEATS - 1),
                address.size.eq(exact_log2(BEAT_BYTES)),
                address.burst.eq(BurstType.INCR),
            ]
        m.d.comb += [
            ar.valid.eq(asked != PAGE_BURSTS),
            ar.payload.addr.eq(place(self.i_from, asked)),
            r.ready.eq(1),
            buffer.i.valid.eq(r.valid),
            buffer.i.payload.eq(r.payload.data),
            burst_landed.eq(r.valid & landed[:beat_bits].all()),
            aw.valid.eq(to_announce != 0),
            aw.payload.addr.eq(place(places[leaving], announced)),
            burst_announced.eq(aw.valid & aw.ready),
            # Only beats of bursts buffered in full: W never waits for R within a burst.
            w.valid.eq(buffer.o.valid & (to_send != 0)),
            w.payload.data.eq(buffer.o.payload),
            w.payload.strb.eq(Const(-1, BEAT_BYTES).as_unsigned()),
            w.payload.last.eq(sent.all()),
            burst_sent.eq(w.valid & w.ready & w.payload.last),
            b.ready.eq(1),
            buffer.o.ready.eq(w.valid & w.ready),
            self.o_ready.eq(pages != PAGES),
            self.o_loaded.eq(landed == PAGE_BEATS),
            self.o_busy.eq(pages != 0),
            self.o_written.eq(b.valid & answered.all()),
            self.o_failed.eq(
                (r.valid & (r.payload.resp != Response.OKAY))
                | (b.valid & (b.payload.resp != Response.OKAY))
            ),
        ]
        m.d.sync += [
            asked.eq(asked + (ar.valid & ar.ready)),
            landed.eq(landed + r.valid),
            announced.eq(announced + burst_announced),
            sent.eq(sent + (w.valid & w.ready)),
            answered.eq(answered + b.valid),
            to_announce.eq(to_announce + burst_landed - burst_announced),
            to_send.eq(to_send + burst_landed - burst_sent),
            pages.eq(pages + self.i_start - self.o_written),
            leaving.eq(leaving + (burst_announced & announced.all())),
        ]
        with m.If(self.i_start):
            m.d.sync += [
                asked.eq(0),
                landed.eq(0),
                places[entered].eq(self.i_to),
                entered.eq(entered + 1),
            ]
        return m
