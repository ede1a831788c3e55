"""Matching of write responses with their bursts."""

from amaranth import Array, Cat, Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.axi.burst import BurstLayout, id_width
from nearstep_hw.axi.fault import BusFaultSignature
from nearstep_hw.axi.signature import Response, WriteResponseLayout


class WriteResponses(wiring.Component):
    """Tracks issued bursts until their response, and detects written blocks.

    Responses of one stream are in the order of its bursts, those of different streams in any order.
    After a fault of a stream no further block of the stream is reported: its memory is incomplete.

    *Timing*: combinational from B to the outputs; a burst and a response a cycle.

    Parameters
    ----------
    layout : layout of a burst.
    streams, address_width : as in `layout`.
    bursts_ahead : most outstanding bursts of a stream, rounded up to a power of two.

    Members
    -------
    i_burst : the next burst.
    o_room : the burst can be tracked.
    i_issue : the burst is issued; only with `o_room`.
    b : channel B; BREADY is always high.
    o_block_done : a bit for each stream: a block is written and acknowledged.
    fault : a burst got a response other than OKAY; with the burst's address.
    o_idle : no burst is outstanding.
    i_clear : clears faults; only when `o_idle`.
    """

    def __init__(
        self, layout: BurstLayout, *, streams: int, address_width: int, bursts_ahead: int
    ) -> None:
        self.streams = streams
        self.address_width = address_width
        self.index_width = ceil_log2(bursts_ahead)
        super().__init__(
            {
                "i_burst": In(layout),
                "o_room": Out(1),
                "i_issue": In(1),
                "b": In(stream.Signature(WriteResponseLayout(id_width=id_width(streams)))),
                "o_block_done": Out(streams),
                "fault": Out(BusFaultSignature(streams=streams, address_width=address_width)),
                "o_idle": Out(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        record = data.StructLayout({"address": self.address_width, "block_last": 1})
        m.submodules.memory = memory = Memory(
            shape=record, depth=self.streams << self.index_width, init=[]
        )
        write_port = memory.write_port()
        read_port = memory.read_port(domain="comb")
        pointer = range(2 << self.index_width)
        issued = Array(Signal(pointer, name=f"issued{i}") for i in range(self.streams))
        answered = Array(Signal(pointer, name=f"answered{i}") for i in range(self.streams))
        faulty = Signal(self.streams)
        into, out = self.i_burst.stream, self.b.payload.id
        outstanding = Signal(pointer)
        answer = Signal()
        okay = Signal()
        waiting = Signal(self.streams)

        m.d.comb += [
            self.b.ready.eq(1),
            outstanding.eq(issued[into] - answered[into]),
            self.o_room.eq(~outstanding[-1]),
            write_port.addr.eq(Cat(issued[into][: self.index_width], into)),
            write_port.data.address.eq(self.i_burst.address),
            write_port.data.block_last.eq(self.i_burst.block_last),
            write_port.en.eq(self.i_issue),
            read_port.addr.eq(Cat(answered[out][: self.index_width], out)),
            answer.eq(self.b.valid & Array(waiting)[out]),
            okay.eq(self.b.payload.resp == Response.OKAY),
            self.fault.valid.eq(answer & ~okay),
            self.fault.stream.eq(out),
            self.fault.address.eq(read_port.data.address),
            self.fault.response.eq(self.b.payload.resp),
            waiting.eq(Cat(i != a for i, a in zip(issued, answered, strict=True))),
            self.o_idle.eq(waiting == 0),
        ]
        with m.If(self.i_issue):
            m.d.sync += issued[into].eq(issued[into] + 1)
        with m.If(answer):
            m.d.sync += answered[out].eq(answered[out] + 1)
            with m.If(~okay):
                m.d.sync += faulty.bit_select(out, 1).eq(1)
            with m.Elif(read_port.data.block_last):
                m.d.comb += self.o_block_done.eq((1 << out) & ~faulty)
        return ResetInserter(self.i_clear)(m)
