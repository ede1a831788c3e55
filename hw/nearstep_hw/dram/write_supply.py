"""Takes the W channel to the PHY, and answers on B."""

from amaranth import Cat, Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.signature import Response
from nearstep_hw.dram.dfi import TPHY_WRLAT
from nearstep_hw.dram.geometry import BEAT_BYTES
from nearstep_hw.dram.queue import ShortQueue
from nearstep_hw.stream.fifo import StreamFifo


class WriteSupply(wiring.Component):
    """Holds write data until their command is given and hands them out in time.

    A burst may enter the order of commands when all of its data are here, so that no command waits
    for W. It is answered when its last command is given: from then on every read that is asked for
    comes behind it.

    *Timing*: data follow the command, which is a cycle later on the pins than `i_issue`, by
    TPHY_WRLAT cycles.

    Parameters
    ----------
    id_width : bits of an AXI ID.
    depth : beats, a power of two; more than two of the longest bursts, so that the next burst
        arrives while one is sent.
    bursts : most bursts that are announced and not answered.

    Members
    -------
    i_valid, o_ready, i_data, i_strobe, i_last : the channel W.
    o_whole : there is a burst, beyond those that have entered, whose data are all here.
    i_enter : it enters the order.
    i_issue, i_id, i_end : a write command is given; it is the last of its burst.
    o_data, o_mask, o_enable : to the PHY.
    o_answer_valid, i_answer_ready, o_answer_id, o_answer : the channel B.
    o_idle : no data on the way to the PHY.
    """

    def __init__(self, *, id_width: int, depth: int, bursts: int) -> None:
        self.id_width = id_width
        self.depth = depth
        self.bursts = bursts
        super().__init__(
            {
                "i_valid": In(1),
                "o_ready": Out(1),
                "i_data": In(8 * BEAT_BYTES),
                "i_strobe": In(BEAT_BYTES),
                "i_last": In(1),
                "o_whole": Out(1),
                "i_enter": In(1),
                "i_issue": In(1),
                "i_id": In(id_width),
                "i_end": In(1),
                "o_data": Out(8 * BEAT_BYTES),
                "o_mask": Out(BEAT_BYTES),
                "o_enable": Out(1),
                "o_answer_valid": Out(1),
                "i_answer_ready": In(1),
                "o_answer_id": Out(id_width),
                "o_answer": Out(Response),
                "o_idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.data = beats = StreamFifo(8 * BEAT_BYTES, depth=self.depth)
        m.submodules.strobes = strobes = StreamFifo(BEAT_BYTES, depth=self.depth)
        m.submodules.answers = answers = ShortQueue(self.id_width, depth=self.bursts)
        whole = Signal(range(self.depth + 1))
        given = Signal(TPHY_WRLAT + 1)  # commands whose data have yet to go
        arrives = Signal()

        m.d.comb += [
            beats.i.valid.eq(self.i_valid),
            beats.i.payload.eq(self.i_data),
            strobes.i.valid.eq(self.i_valid),
            strobes.i.payload.eq(self.i_strobe),
            self.o_ready.eq(beats.i.ready),
            arrives.eq(self.i_valid & self.o_ready & self.i_last),
            self.o_whole.eq(whole != 0),
            self.o_enable.eq(given[-1]),
            beats.o.ready.eq(self.o_enable),
            strobes.o.ready.eq(self.o_enable),
            self.o_data.eq(beats.o.payload),
            self.o_mask.eq(~strobes.o.payload),
            answers.i.valid.eq(self.i_issue & self.i_end),
            answers.i.payload.eq(self.i_id),
            self.o_answer_valid.eq(answers.o.valid),
            answers.o.ready.eq(self.i_answer_ready),
            self.o_answer_id.eq(answers.o.payload),
            self.o_answer.eq(Response.OKAY),
            self.o_idle.eq(given == 0),
        ]
        m.d.sync += [
            whole.eq(whole + arrives - self.i_enter),
            given.eq(Cat(self.i_issue, given)),
        ]
        return m
