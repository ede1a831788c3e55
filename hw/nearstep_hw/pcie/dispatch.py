"""Dispatch of routed requests to the units that execute them."""

from amaranth import Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.pcie.completion_job import Source, WaitingRequest
from nearstep_hw.pcie.descriptor import Status
from nearstep_hw.pcie.register_access import RegisterWrite
from nearstep_hw.pcie.route import Route, RoutedChunk


class Dispatcher(wiring.Component):
    """Forwards each chunk to the unit that its route names, in order.

    A register write waits until every memory write before it is done, and blocks later chunks
    meanwhile. Non-posted requests are forwarded without chunks, to a queue; damaged requests are
    dropped.

    *Timing*: combinational.

    Parameters
    ----------
    width : bits of the CQ stream.
    address_width : bits of a byte address of the memory.

    Members
    -------
    i : chunks.
    i_writes_done : no memory write is outstanding.
    o_memory : chunks of memory writes.
    o_register : register writes.
    o_request : non-posted requests.
    o_dropped : a posted request was dropped by its route or as damaged.
    """

    def __init__(self, *, width: int, address_width: int) -> None:
        super().__init__(
            {
                "i": In(stream.Signature(RoutedChunk(width, address_width))),
                "i_writes_done": In(1),
                "o_memory": Out(stream.Signature(RoutedChunk(width, address_width))),
                "o_register": Out(stream.Signature(RegisterWrite)),
                "o_request": Out(stream.Signature(WaitingRequest(address_width))),
                "o_dropped": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        routed = self.i.payload
        chunk, route = routed.chunk, routed.route
        write, request = self.o_register.payload, self.o_request.payload
        posted = Signal()
        m.d.comb += [
            self.o_memory.payload.eq(routed),
            write.word.eq(routed.dword),
            write.both.eq(chunk.dwords == 2),
            write.data.eq(chunk.data),
            request.head.eq(chunk.head),
            request.status.eq(Mux(route == Route.REFUSE, routed.status, Status.SUCCESSFUL)),
            request.dword.eq(routed.dword),
            request.empty.eq(routed.empty),
            self.o_dropped.eq(
                self.i.valid
                & self.i.ready
                & chunk.last
                & posted
                & ((route == Route.DROP) | chunk.discontinue)
            ),
        ]
        with m.Switch(route):
            with m.Case(Route.MEMORY_WRITE):
                m.d.comb += [
                    posted.eq(1),
                    self.o_memory.valid.eq(self.i.valid),
                    self.i.ready.eq(self.o_memory.ready),
                ]
            with m.Case(Route.REGISTER_WRITE):
                m.d.comb += posted.eq(1)
                with m.If(chunk.discontinue | routed.empty):
                    m.d.comb += self.i.ready.eq(1)
                with m.Else():
                    m.d.comb += [
                        self.o_register.valid.eq(self.i.valid & self.i_writes_done),
                        self.i.ready.eq(self.o_register.ready & self.i_writes_done),
                    ]
            with m.Case(Route.DROP):
                m.d.comb += [posted.eq(1), self.i.ready.eq(1)]
            with m.Default():
                m.d.comb += self.i.ready.eq(1)
                with m.If(chunk.last & ~chunk.discontinue):
                    m.d.comb += [
                        self.o_request.valid.eq(self.i.valid),
                        self.i.ready.eq(self.o_request.ready),
                    ]
        with m.Switch(route):
            with m.Case(Route.MEMORY_READ):
                m.d.comb += request.source.eq(Source.MEMORY)
            with m.Case(Route.REGISTER_READ):
                m.d.comb += request.source.eq(Source.REGISTERS)
            with m.Default():
                m.d.comb += request.source.eq(Source.NOWHERE)
        return m
