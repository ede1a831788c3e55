"""Answers AXI requests that no DRAM command can serve."""

from amaranth import Elaboratable, Module, Mux, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import (
    Axi4ReadSignature,
    Axi4WriteSignature,
    BurstType,
    Response,
)
from nearstep_hw.dram.geometry import DramGeometry
from nearstep_hw.dram.request import BEAT_SHIFT, PAGE_BEATS

_READ_ADDRESS = ("arid", "araddr", "arlen", "arsize", "arburst")
_WRITE_ADDRESS = ("awid", "awaddr", "awlen", "awsize", "awburst")


def _refusal(geometry: DramGeometry, address: Value, beats: Value, size: Value, burst: Value):
    """Response to a request, OKAY for one that can be served."""
    first = address[BEAT_SHIFT:]
    page_end = (first % PAGE_BEATS) + beats >= PAGE_BEATS
    unsupported = (burst != BurstType.INCR) | (size != BEAT_SHIFT) | page_end
    outside = (address >> geometry.address_bits).any()
    return Mux(outside, Response.DECERR, Mux(unsupported, Response.SLVERR, Response.OKAY))


class ReadGuard(wiring.Component):
    """Passes the reads that the channel can serve, and answers the others itself.

    DECERR: the address is outside the channel. SLVERR: not INCR, not of full beats, or across a
    page. A refused read waits until all reads before it are answered, so that those of one ID stay
    in order, and holds up those behind it. It becomes no command.

    *Timing*: combinational for what passes.

    Parameters
    ----------
    geometry : of the channel.
    port : of the AXI port.
    bursts : most reads outstanding.

    Members
    -------
    i : from the initiator.
    o : to the controller.
    """

    def __init__(self, geometry: DramGeometry, port: Axi4ReadSignature, *, bursts: int) -> None:
        self.geometry = geometry
        self.bursts = bursts
        super().__init__({"i": In(port), "o": Out(port)})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        i, o = self.i, self.o
        outstanding = Signal(range(self.bursts + 1))
        refusal = Signal(Response)
        refused = Signal.like(refusal)
        refused_id = Signal.like(i.arid)
        left = Signal.like(i.arlen)
        ends = Signal()

        m.d.comb += [
            refusal.eq(_refusal(self.geometry, i.araddr, i.arlen, i.arsize, i.arburst)),
            *(getattr(o, name).eq(getattr(i, name)) for name in _READ_ADDRESS),
            i.rdata.eq(o.rdata),
            i.rid.eq(o.rid),
            i.rresp.eq(o.rresp),
            i.rlast.eq(o.rlast),
            ends.eq(o.rvalid & o.rready & o.rlast),
        ]
        m.d.sync += outstanding.eq(outstanding + (o.arvalid & o.arready) - ends)
        with m.FSM():
            with m.State("PASS"):
                m.d.comb += [i.rvalid.eq(o.rvalid), o.rready.eq(i.rready)]
                with m.If(refusal == Response.OKAY):
                    m.d.comb += [
                        o.arvalid.eq(i.arvalid & (outstanding != self.bursts)),
                        i.arready.eq(o.arready & (outstanding != self.bursts)),
                    ]
                with m.Elif(i.arvalid & (outstanding == 0)):
                    m.d.comb += i.arready.eq(1)
                    m.d.sync += [refused.eq(refusal), refused_id.eq(i.arid), left.eq(i.arlen)]
                    m.next = "REFUSE"
            with m.State("REFUSE"):
                m.d.comb += [
                    i.rvalid.eq(1),
                    i.rid.eq(refused_id),
                    i.rresp.eq(refused),
                    i.rlast.eq(left == 0),
                ]
                with m.If(i.rready):
                    m.d.sync += left.eq(left - 1)
                    with m.If(left == 0):
                        m.next = "PASS"
        return m


class WriteGuard(wiring.Component):
    """Passes the writes that the channel can serve, and answers the others itself.

    Responses and order as in `ReadGuard`; the data of a refused write are taken and dropped. W is
    taken only behind its AW.

    *Timing*: combinational for what passes; W one cycle after AW at the earliest.

    Parameters
    ----------
    geometry : of the channel.
    port : of the AXI port.
    bursts : most writes outstanding.

    Members
    -------
    i : from the initiator.
    o : to the controller.
    """

    def __init__(self, geometry: DramGeometry, port: Axi4WriteSignature, *, bursts: int) -> None:
        self.geometry = geometry
        self.bursts = bursts
        super().__init__({"i": In(port), "o": Out(port)})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        i, o = self.i, self.o
        outstanding = Signal(range(self.bursts + 1))
        owed = Signal(range(self.bursts + 1))  # bursts announced whose data are not all taken
        refusal = Signal(Response)
        refused = Signal.like(refusal)
        refused_id = Signal.like(i.awid)
        announced = Signal()
        sent = Signal()
        answered = Signal()

        m.d.comb += [
            refusal.eq(_refusal(self.geometry, i.awaddr, i.awlen, i.awsize, i.awburst)),
            *(getattr(o, name).eq(getattr(i, name)) for name in _WRITE_ADDRESS),
            o.wdata.eq(i.wdata),
            o.wstrb.eq(i.wstrb),
            o.wlast.eq(i.wlast),
            i.bid.eq(o.bid),
            i.bresp.eq(o.bresp),
            announced.eq(o.awvalid & o.awready),
            sent.eq(o.wvalid & o.wready & o.wlast),
            answered.eq(o.bvalid & o.bready),
        ]
        m.d.sync += [
            outstanding.eq(outstanding + announced - answered),
            owed.eq(owed + announced - sent),
        ]
        with m.FSM():
            with m.State("PASS"):
                m.d.comb += [
                    o.wvalid.eq(i.wvalid & (owed != 0)),
                    i.wready.eq(o.wready & (owed != 0)),
                    i.bvalid.eq(o.bvalid),
                    o.bready.eq(i.bready),
                ]
                with m.If(refusal == Response.OKAY):
                    m.d.comb += [
                        o.awvalid.eq(i.awvalid & (outstanding != self.bursts)),
                        i.awready.eq(o.awready & (outstanding != self.bursts)),
                    ]
                with m.Elif(i.awvalid & (outstanding == 0)):
                    m.d.comb += i.awready.eq(1)
                    m.d.sync += [refused.eq(refusal), refused_id.eq(i.awid)]
                    m.next = "DROP"
            with m.State("DROP"):
                m.d.comb += i.wready.eq(1)
                with m.If(i.wvalid & i.wlast):
                    m.next = "ANSWER"
            with m.State("ANSWER"):
                m.d.comb += [i.bvalid.eq(1), i.bid.eq(refused_id), i.bresp.eq(refused)]
                with m.If(i.bready):
                    m.next = "PASS"
        return m
