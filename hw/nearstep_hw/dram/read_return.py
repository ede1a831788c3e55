"""Transfer of read data from the PHY to the R channel."""

from amaranth import Elaboratable, Module, Signal, unsigned
from amaranth.lib import data, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.dram.queue import ShortQueue
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_spec.dram.geometry import BEAT_BYTES


class ReadReturn(wiring.Component):
    """Reserves a place for every outstanding read beat, so that R may stall for any time.

    *Timing*: `o_valid` two cycles after the data; a beat a cycle. A place is free for a new beat
    one cycle after its beat was taken.

    Parameters
    ----------
    id_width : bits of an AXI ID.
    places : beats, a power of two.

    Members
    -------
    i_reserve : reserves a place; only with `o_space`.
    o_space : a place is free.
    i_issue, i_id, i_last : the command of the oldest reserved place is issued.
    i_valid, i_data : data of the commands, in order.
    o_valid, i_ready, o_data, o_id, o_last : beats for R.
    o_idle : the data of all commands were received.
    """

    def __init__(self, *, id_width: int, places: int) -> None:
        self.id_width = id_width
        self.places = places
        super().__init__(
            {
                "i_reserve": In(1),
                "o_space": Out(1),
                "i_issue": In(1),
                "i_id": In(id_width),
                "i_last": In(1),
                "i_valid": In(1),
                "i_data": In(8 * BEAT_BYTES),
                "o_valid": Out(1),
                "i_ready": In(1),
                "o_data": Out(8 * BEAT_BYTES),
                "o_id": Out(id_width),
                "o_last": Out(1),
                "o_idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        tag = data.StructLayout({"id": unsigned(self.id_width), "last": unsigned(1)})
        m.submodules.tags = tags = ShortQueue(tag, depth=self.places)
        m.submodules.beats = beats = StreamFifo(8 * BEAT_BYTES, depth=self.places)
        taken = Signal()
        promised = Signal(range(self.places + 1))
        awaited = Signal(range(self.places + 1))  # data from the PHY

        m.d.comb += [
            taken.eq(self.o_valid & self.i_ready),
            self.o_space.eq(promised != self.places),
            self.o_idle.eq(awaited == 0),
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
        ]
        m.d.sync += [
            promised.eq(promised + self.i_reserve - taken),
            awaited.eq(awaited + self.i_issue - self.i_valid),
        ]
        return m
