"""The channels AW, W and B of the controller."""

from amaranth import Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import Axi4WriteSignature, Response
from nearstep_hw.dram.queue import ShortQueue
from nearstep_hw.dram.request import BEAT_SHIFT, BurstLayout, refusal
from nearstep_hw.dram.write_supply import WriteSupply
from nearstep_spec.dram.geometry import BEAT_BYTES, DramGeometry


class WritePort(wiring.Component):
    """Queues write bursts, buffers their data, and sends B.

    A burst is offered when all of its data were received, and answered when its last command is
    issued: later reads are ordered after it. W is accepted only after its AW. A refused burst waits
    until all bursts before it are answered; its data are dropped and it issues no command.

    *Timing*: a burst is offered one cycle after its last beat of W, BVALID rises one cycle after
    the last command.

    Parameters
    ----------
    geometry : of the channel.
    address_width, id_width : of the AXI port, bits.
    bursts : most bursts that are announced and not answered.
    places : see `WriteSupply`.

    Members
    -------
    bus : AW, W and B.
    o : bursts, in order.
    i_issue, i_id, i_last : a write command is issued; the last of its burst.
    o_data, o_mask, o_enable, o_idle : see `WriteSupply`.

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
                    Axi4WriteSignature(
                        address_width=address_width, data_width=8 * BEAT_BYTES, id_width=id_width
                    )
                ),
                "o": Out(stream.Signature(BurstLayout(geometry, id_width=id_width))),
                "i_issue": In(1),
                "i_id": In(id_width),
                "i_last": In(1),
                "o_data": Out(8 * BEAT_BYTES),
                "o_mask": Out(BEAT_BYTES),
                "o_enable": Out(1),
                "o_idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        aw, w, b = self.bus.aw, self.bus.w, self.bus.b
        m.submodules.queue = queue = self.queue
        m.submodules.keep = keep = ShortQueue(1, depth=self.bursts)  # keep a burst's data
        m.submodules.answers = answers = ShortQueue(self.id_width, depth=self.bursts)
        m.submodules.supply = supply = WriteSupply(places=self.places)
        asked, head = queue.i.payload, queue.o.payload
        outstanding = Signal(range(self.bursts + 1))
        entered = Signal(range(self.bursts + 1))  # outstanding bursts that were offered and taken
        dropped = Signal(range(self.bursts + 1))  # refused bursts whose data were dropped
        announced = Signal()
        taken = Signal()
        answered = Signal()
        refuse = Signal()

        m.d.comb += [
            aw.ready.eq(outstanding != self.bursts),
            announced.eq(aw.valid & aw.ready),
            queue.i.valid.eq(announced),
            asked.write.eq(1),
            asked.id.eq(aw.payload.id),
            asked.address.eq(aw.payload.addr[BEAT_SHIFT:]),
            asked.last.eq(aw.payload.len),
            asked.refusal.eq(
                refusal(
                    self.geometry,
                    address=aw.payload.addr,
                    beats_less_one=aw.payload.len,
                    size=aw.payload.size,
                    burst=aw.payload.burst,
                )
            ),
            keep.i.valid.eq(announced),
            keep.i.payload.eq(asked.refusal == Response.OKAY),
            supply.i_valid.eq(w.valid & keep.o.valid & keep.o.payload),
            supply.i_data.eq(w.payload.data),
            supply.i_strobe.eq(w.payload.strb),
            supply.i_last.eq(w.payload.last),
            w.ready.eq(keep.o.valid & (supply.o_ready | ~keep.o.payload)),
            taken.eq(w.valid & w.ready & w.payload.last),
            keep.o.ready.eq(taken),
            self.o.payload.eq(head),
            self.o.valid.eq(queue.o.valid & (head.refusal == Response.OKAY) & supply.o_whole),
            supply.i_enter.eq(self.o.valid & self.o.ready),
            supply.i_issue.eq(self.i_issue),
            self.o_data.eq(supply.o_data),
            self.o_mask.eq(supply.o_mask),
            self.o_enable.eq(supply.o_enable),
            self.o_idle.eq(supply.o_idle),
            answers.i.valid.eq(self.i_issue & self.i_last),
            answers.i.payload.eq(self.i_id),
            refuse.eq((head.refusal != Response.OKAY) & (entered == 0) & (dropped != 0)),
            queue.o.ready.eq(supply.i_enter | (refuse & b.ready)),
            b.valid.eq(answers.o.valid | refuse),
            b.payload.id.eq(Mux(refuse, head.id, answers.o.payload)),
            b.payload.resp.eq(Mux(refuse, head.refusal, Response.OKAY)),
            answered.eq(b.valid & b.ready),
            answers.o.ready.eq(b.ready),
        ]
        m.d.sync += [
            outstanding.eq(outstanding + announced - answered),
            entered.eq(entered + supply.i_enter - (answered & ~refuse)),
            dropped.eq(dropped + (taken & ~keep.o.payload) - (answered & refuse)),
        ]
        return m
