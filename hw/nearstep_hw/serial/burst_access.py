"""One burst at a time on an AXI4 port."""

from amaranth import Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.axi.signature import Axi4Signature, BurstType

BURST_BEATS = 16
"""Most beats of a burst, which crosses no multiple of `BURST_BEATS` beats: a buffer that fits LUT
RAM."""

INDEX_BITS = ceil_log2(BURST_BEATS)
RESPONSE_BITS = 2


class BurstAccess(wiring.Component):
    """Moves beats between a buffer and memory.

    The buffer index of a beat is its address modulo `BURST_BEATS`. A burst that has begun runs to
    completion, without a timeout.

    *Timing*: ARVALID or AWVALID rises a cycle after `i_start`, WVALID a cycle later; a beat a
    cycle. RREADY and BREADY are always high. `o_busy` falls two cycles after BVALID, three after
    the last RVALID.

    Parameters
    ----------
    address_width, data_width : bits.

    Members
    -------
    m_axi : the port.
    i_start : strobe, while not `o_busy`: begin a burst.
    i_write, i_address, i_last : of the burst: whether it writes; address of its first beat; index
        of its last beat.
    o_busy : a burst is in flight; rises a cycle after `i_start`.
    o_response : the first response of the last burst that was an error, or OKAY.
    o_index : buffer index of the beat to write, or of the beat read.
    i_data, i_strobe : the buffer's beat at `o_index`.
    o_put, o_data : strobe: a beat was read.
    i_reset : the device behind the port is in reset: a burst in flight is cancelled.
    """

    def __init__(self, *, address_width: int, data_width: int) -> None:
        self.beat_bytes = data_width // 8
        super().__init__(
            {
                "m_axi": Out(
                    Axi4Signature(address_width=address_width, data_width=data_width, id_width=1)
                ),
                "i_start": In(1),
                "i_write": In(1),
                "i_address": In(address_width),
                "i_last": In(INDEX_BITS),
                "o_busy": Out(1),
                "o_response": Out(RESPONSE_BITS),
                "o_index": Out(INDEX_BITS),
                "i_data": In(data_width),
                "i_strobe": In(self.beat_bytes),
                "o_put": Out(1),
                "o_data": Out(data_width),
                "i_reset": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        axi = self.m_axi
        first = self.i_address[ceil_log2(self.beat_bytes) :][:INDEX_BITS]
        last = Signal(INDEX_BITS)
        sending, reading, awaited = Signal(), Signal(), Signal()
        beat = Signal.like(axi.r.payload, reset_less=True)
        landed = Signal()
        begin = Signal()

        m.d.comb += [
            axi.r.ready.eq(1),
            axi.b.ready.eq(1),
            begin.eq(self.i_start & ~self.o_busy),
            self.o_put.eq(landed),
            self.o_data.eq(beat.data),
        ]
        for channel in (axi.ar, axi.aw):
            m.d.comb += [
                channel.payload.size.eq(ceil_log2(self.beat_bytes)),
                channel.payload.burst.eq(BurstType.INCR),
            ]
            with m.If(begin):
                m.d.sync += [
                    channel.payload.addr.eq(self.i_address),
                    channel.payload.len.eq((self.i_last - first)[:INDEX_BITS]),
                ]
        with m.If(begin):
            m.d.sync += [
                self.o_busy.eq(1),
                self.o_response.eq(0),
                self.o_index.eq(first),
                last.eq(self.i_last),
                axi.ar.valid.eq(~self.i_write),
                axi.aw.valid.eq(self.i_write),
                sending.eq(self.i_write),
                awaited.eq(self.i_write),
                reading.eq(~self.i_write),
            ]
        with m.Else():
            with m.If(axi.ar.ready):
                m.d.sync += axi.ar.valid.eq(0)
            with m.If(axi.aw.ready):
                m.d.sync += axi.aw.valid.eq(0)
            m.d.sync += self.o_busy.eq(reading | awaited | landed)

        with m.If(~axi.w.valid | axi.w.ready):
            m.d.sync += [
                axi.w.valid.eq(sending),
                axi.w.payload.data.eq(self.i_data),
                axi.w.payload.strb.eq(self.i_strobe),
                axi.w.payload.last.eq(self.o_index == last),
            ]
            with m.If(sending):
                m.d.sync += self.o_index.eq(self.o_index + 1)
                with m.If(self.o_index == last):
                    m.d.sync += sending.eq(0)

        m.d.sync += [landed.eq(axi.r.valid & reading), beat.eq(axi.r.payload)]
        with m.If(landed):
            m.d.sync += self.o_index.eq(self.o_index + 1)
        for channel, wanted in ((axi.r, reading), (axi.b, awaited)):
            response = channel.payload.resp.as_value()
            with m.If(channel.valid & wanted & response[1] & (self.o_response == 0)):
                m.d.sync += self.o_response.eq(response)
        with m.If(axi.r.valid & axi.r.payload.last):
            m.d.sync += reading.eq(0)
        with m.If(axi.b.valid):
            m.d.sync += awaited.eq(0)
        return ResetInserter(self.i_reset)(m)
