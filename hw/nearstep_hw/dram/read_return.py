"""Takes read data from the PHY to the R channel."""

from amaranth import Elaboratable, Module, Signal, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import Response
from nearstep_hw.dram.geometry import BEAT_BYTES
from nearstep_hw.dram.queue import ShortQueue
from nearstep_hw.stream.fifo import StreamFifo


class ReadReturn(wiring.Component):
    """Keeps a place for every beat that is asked of the DRAM, so that R may stall for any time.

    *Timing*: RVALID two cycles after the data; a beat a cycle. A place is free for a new command
    one cycle after its beat was taken.

    Parameters
    ----------
    id_width : bits of an AXI ID.
    depth : places, a power of two. A column command every cycle needs as many as the way from the
        command to R takes cycles.

    Members
    -------
    i_issue, i_id, i_last : a read command is given; only with `o_space`.
    o_space : there is a place.
    i_valid, i_data : data of the commands, in order.
    o_valid, i_ready, o_data, o_id, o_last, o_response : the channel R.
    o_idle : all that was asked for has been handed over.
    """

    def __init__(self, *, id_width: int, depth: int) -> None:
        self.id_width = id_width
        self.depth = depth
        super().__init__(
            {
                "i_issue": In(1),
                "i_id": In(id_width),
                "i_last": In(1),
                "o_space": Out(1),
                "i_valid": In(1),
                "i_data": In(8 * BEAT_BYTES),
                "o_valid": Out(1),
                "i_ready": In(1),
                "o_data": Out(8 * BEAT_BYTES),
                "o_id": Out(id_width),
                "o_last": Out(1),
                "o_response": Out(Response),
                "o_idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        tag = data.StructLayout({"id": unsigned(self.id_width), "last": unsigned(1)})
        m.submodules.tags = tags = ShortQueue(tag, depth=self.depth)
        m.submodules.beats = beats = StreamFifo(8 * BEAT_BYTES, depth=self.depth)
        taken = Signal()
        promised = Signal(range(self.depth + 1))

        m.d.comb += [
            taken.eq(self.o_valid & self.i_ready),
            self.o_space.eq(promised != self.depth),
            self.o_idle.eq(promised == 0),
            tags.i.valid.eq(self.i_issue),
            tags.i.payload.id.eq(self.i_id),
            tags.i.payload.last.eq(self.i_last),
            tags.o.ready.eq(taken),
            beats.i.valid.eq(self.i_valid),
            beats.i.payload.eq(self.i_data),
            beats.o.ready.eq(self.i_ready),
            self.o_valid.eq(beats.o.valid),
            self.o_data.eq(beats.o.payload),
            self.o_id.eq(tags.o.payload.id),
            self.o_last.eq(tags.o.payload.last),
            self.o_response.eq(Response.OKAY),
        ]
        m.d.sync += promised.eq(promised + self.i_issue - taken)
        return m
