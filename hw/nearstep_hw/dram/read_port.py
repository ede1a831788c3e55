"""The channels AR and R of the controller."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import Axi4ReadSignature, Response
from nearstep_hw.dram.queue import ShortQueue
from nearstep_hw.dram.read_return import ReadReturn
from nearstep_hw.dram.request import BEAT_SHIFT, BurstLayout, refusal
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry


class ReadPort(wiring.Component):
    """Queues read bursts, returns their data, and answers bursts that cannot be served.

    Data of all IDs are in the order of AR. A refused burst waits until all bursts before it are
    answered, gets the requested number of beats, and issues no command.

    *Timing*: a burst is offered one cycle after ARVALID, a beat two cycles after its data.

    Parameters
    ----------
    geometry : of the channel.
    address_width, id_width : of the AXI port, bits.
    bursts : depth of the queue.
    places : see `ReadReturn`.

    Members
    -------
    bus : AR and R.
    o : bursts, in order.
    i_reserve, o_space, i_issue, i_id, i_last, i_valid, i_data, o_idle : see `ReadReturn`.

    Attributes
    ----------
    queue : the waiting bursts, for inspection.
    """

    def __init__(
        self, geometry: DramGeometry, *, address_width: int, id_width: int, bursts: int, places: int
    ) -> None:
        self.geometry = geometry
        self.id_width = id_width
        self.bursts = bursts
        self.places = places
        self.queue = ShortQueue(BurstLayout(geometry, id_width=id_width), depth=bursts)
        super().__init__(
            {
                "bus": In(
                    Axi4ReadSignature(
                        address_width=address_width, data_width=8 * BEAT_BYTES, id_width=id_width
                    )
                ),
                "o": Out(stream.Signature(BurstLayout(geometry, id_width=id_width))),
                "i_reserve": In(1),
                "o_space": Out(1),
                "i_issue": In(1),
                "i_id": In(id_width),
                "i_last": In(1),
                "i_valid": In(1),
                "i_data": In(8 * BEAT_BYTES),
                "o_idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        ar, r = self.bus.ar, self.bus.r
        m.submodules.queue = queue = self.queue
        m.submodules.returns = returns = ReadReturn(id_width=self.id_width, places=self.places)
        asked, head = queue.i.payload, queue.o.payload
        # Every accepted burst but one has a reserved place for its last beat.
        unanswered = Signal(range(self.places + 2))
        left = Signal.like(head.last)
        answered = Signal()

        m.d.comb += [
            queue.i.valid.eq(ar.valid),
            ar.ready.eq(queue.i.ready),
            asked.id.eq(ar.payload.id),
            asked.address.eq(ar.payload.addr[BEAT_SHIFT:]),
            asked.last.eq(ar.payload.len),
            asked.refusal.eq(
                refusal(
                    self.geometry,
                    address=ar.payload.addr,
                    beats_less_one=ar.payload.len,
                    size=ar.payload.size,
                    burst=ar.payload.burst,
                )
            ),
            self.o.payload.eq(head),
            r.payload.data.eq(returns.o_data),
            answered.eq(returns.o_valid & returns.i_ready & returns.o_last),
            *(
                getattr(returns, name).eq(getattr(self, name))
                for name in ("i_reserve", "i_issue", "i_id", "i_last", "i_valid", "i_data")
            ),
            self.o_space.eq(returns.o_space),
            self.o_idle.eq(returns.o_idle),
        ]
        m.d.sync += unanswered.eq(unanswered + (self.o.valid & self.o.ready) - answered)
        with m.FSM():
            with m.State("SERVE"):
                m.d.comb += [
                    r.valid.eq(returns.o_valid),
                    returns.i_ready.eq(r.ready),
                    r.payload.id.eq(returns.o_id),
                    r.payload.last.eq(returns.o_last),
                    r.payload.resp.eq(Response.OKAY),
                ]
                m.d.sync += left.eq(head.last)
                with m.If(head.refusal == Response.OKAY):
                    m.d.comb += [self.o.valid.eq(queue.o.valid), queue.o.ready.eq(self.o.ready)]
                with m.Elif(queue.o.valid & (unanswered == 0)):
                    m.next = "REFUSE"
            with m.State("REFUSE"):
                m.d.comb += [
                    r.valid.eq(1),
                    r.payload.id.eq(head.id),
                    r.payload.last.eq(left == 0),
                    r.payload.resp.eq(head.refusal),
                ]
                with m.If(r.ready):
                    m.d.sync += left.eq(left - 1)
                    with m.If(left == 0):
                        m.d.comb += queue.o.ready.eq(1)
                        m.next = "SERVE"
        return m
