"""Copies a page of memory."""

from amaranth import Cat, Const, Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2, exact_log2

from nearstep_hw.axi.signature import Axi4ReadSignature, Axi4WriteSignature, BurstType, Response
from nearstep_hw.coarse.config import BEAT_BYTES, BURST_BEATS, PAGE_BYTES
from nearstep_hw.stream.fifo import StreamFifo

COPY_ID_WIDTH = 1
PAGE_BEATS = PAGE_BYTES // BEAT_BYTES
PAGE_BURSTS = PAGE_BEATS // BURST_BEATS


class PageCopy(wiring.Component):
    """Reads a page into a buffer that holds all of it, and writes it as it comes.

    *Timing*: a beat a cycle in each direction. A burst is announced when all its data are there.

    Parameters
    ----------
    address_width : bits of a byte address.

    Members
    -------
    read, write : to memory. RREADY and BREADY are always high.
    i_start : begins; only when nothing is in work.
    i_from, i_to : first bytes of the pages; held until `o_done`.
    o_done : pulse; everything is answered.
    o_failed : with `o_done`: something was answered other than OKAY.
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
                "o_done": Out(1),
                "o_failed": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.buffer = buffer = StreamFifo(8 * BEAT_BYTES, depth=PAGE_BEATS)
        read, write = self.read, self.write
        burst_bits = exact_log2(BURST_BEATS * BEAT_BYTES)
        page_bits = exact_log2(PAGE_BYTES)
        asked = Signal(range(PAGE_BURSTS + 1), init=PAGE_BURSTS)
        announced = Signal.like(asked, init=PAGE_BURSTS)
        answered = Signal.like(asked, init=PAGE_BURSTS)
        landed = Signal(range(PAGE_BEATS + 1))
        sent = Signal.like(landed)
        busy, failed = Signal(), Signal()

        def place(page: Signal, burst: Signal) -> Cat:
            offset = burst[: ceil_log2(PAGE_BURSTS)]
            return Cat(Const(0, burst_bits), offset, page[page_bits:])

        for port, prefix in ((read, "ar"), (write, "aw")):
            m.d.comb += [
                getattr(port, f"{prefix}len").eq(BURST_BEATS - 1),
                getattr(port, f"{prefix}size").eq(exact_log2(BEAT_BYTES)),
                getattr(port, f"{prefix}burst").eq(BurstType.INCR),
            ]
        m.d.comb += [
            read.arvalid.eq(asked != PAGE_BURSTS),
            read.araddr.eq(place(self.i_from, asked)),
            read.rready.eq(1),
            buffer.i.valid.eq(read.rvalid),
            buffer.i.payload.eq(read.rdata),
            write.awvalid.eq(busy & (landed[exact_log2(BURST_BEATS) :] > announced)),
            write.awaddr.eq(place(self.i_to, announced)),
            # Only beats of bursts that have landed whole: W never waits for R within a burst.
            write.wvalid.eq(
                buffer.o.valid
                & (sent[exact_log2(BURST_BEATS) :] < landed[exact_log2(BURST_BEATS) :])
            ),
            write.wdata.eq(buffer.o.payload),
            write.wstrb.eq(Const(-1, BEAT_BYTES).as_unsigned()),
            write.wlast.eq(sent[: exact_log2(BURST_BEATS)].all()),
            write.bready.eq(1),
            buffer.o.ready.eq(write.wvalid & write.wready),
            self.o_done.eq(busy & (answered == PAGE_BURSTS)),
            self.o_failed.eq(failed),
        ]
        m.d.sync += [
            asked.eq(asked + (read.arvalid & read.arready)),
            announced.eq(announced + (write.awvalid & write.awready)),
            answered.eq(answered + write.bvalid),
            landed.eq(landed + read.rvalid),
            sent.eq(sent + (write.wvalid & write.wready)),
        ]
        with m.If(
            (read.rvalid & (read.rresp != Response.OKAY))
            | (write.bvalid & (write.bresp != Response.OKAY))
        ):
            m.d.sync += failed.eq(1)
        with m.If(self.o_done):
            m.d.sync += busy.eq(0)
        with m.If(self.i_start):
            m.d.sync += [
                *(each.eq(0) for each in (asked, announced, answered, landed, sent, failed)),
                busy.eq(1),
            ]
        return m
