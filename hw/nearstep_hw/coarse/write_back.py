"""Write path: results to memory."""

from amaranth import Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.axi.fault import BusFaultSignature
from nearstep_hw.axi.signature import Axi4WriteSignature, connect_channels
from nearstep_hw.axi.writer import WriteMover
from nearstep_hw.coarse.entry import RangeLayout, StepLayout
from nearstep_hw.coarse.range_bursts import RangeBursts
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_hw.stream.gearbox import StreamPack
from nearstep_spec.coarse.config import BEAT_BYTES, BURST_BEATS, CoarseConfig

BUFFER_BEATS = 4 * BURST_BEATS
BURSTS_AHEAD = 16
STEPS_AHEAD = 4


class WriteBack(wiring.Component):
    """Writes the beats of each step within the tensor, in bursts whose data are buffered in full.

    *Timing*: a memory beat a cycle.

    Members
    -------
    bus : AW, W and B; BREADY is always high.
    i : steps that write at least one beat; each before its elements.
    i_destination : byte address of the tensor, held.
    i_tail : WSTRB of the last beat of the tensor.
    data : elements of these beats, as many as the ALUs output in a cycle.
    fault : a burst got a response other than OKAY; with the burst's address.
    i_stop : issues no more bursts.
    o_idle : all accepted steps are written and acknowledged.
    o_bus_idle : no burst is outstanding.
    i_clear : clears all state; only when `o_bus_idle`.
    """

    def __init__(self, config: CoarseConfig) -> None:
        self.config = config
        super().__init__(
            {
                "bus": Out(
                    Axi4WriteSignature(
                        address_width=config.address_width, data_width=8 * BEAT_BYTES, id_width=1
                    )
                ),
                "i": In(stream.Signature(StepLayout(config))),
                "i_destination": In(config.address_width),
                "i_tail": In(BEAT_BYTES),
                "data": In(stream.Signature(32 * config.alus)),
                "fault": Out(BusFaultSignature(streams=1, address_width=config.address_width)),
                "i_stop": In(1),
                "o_idle": Out(1),
                "o_bus_idle": Out(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.steps = steps = StreamFifo(RangeLayout(self.config), depth=STEPS_AHEAD)
        m.submodules.bursts = bursts = RangeBursts(self.config)
        m.submodules.pack = pack = StreamPack(
            piece_width=32 * self.config.alus, factor=8 * BEAT_BYTES // (32 * self.config.alus)
        )
        m.submodules.buffer = buffer = StreamFifo(8 * BEAT_BYTES, depth=BUFFER_BEATS)
        m.submodules.mover = mover = WriteMover(
            streams=1,
            address_width=self.config.address_width,
            beat_bytes=BEAT_BYTES,
            burst_beats=BURST_BEATS,
            buffer_beats=BUFFER_BEATS + 1,
            bursts_ahead=BURSTS_AHEAD,
        )
        step = self.i.payload
        waiting = Signal(range(STEPS_AHEAD + 3))  # steps whose bursts are not all announced
        taken = self.i.valid & self.i.ready
        announced = Signal()

        connect_channels(m, mover.bus, self.bus)
        wiring.connect(m, steps.o, bursts.i)
        wiring.connect(m, bursts.o, mover.i)
        wiring.connect(m, buffer.o, mover.data[0])
        wiring.connect(m, wiring.flipped(self.fault), mover.fault)
        m.d.comb += [
            steps.i.valid.eq(self.i.valid),
            steps.i.payload.at.eq((self.i_destination >> exact_log2(BEAT_BYTES)) + step.at),
            steps.i.payload.beats.eq(step.beats),
            steps.i.payload.tail.eq(step.tail),
            self.i.ready.eq(steps.i.ready),
            pack.i.valid.eq(self.data.valid),
            pack.i.payload.data.eq(self.data.payload),
            self.data.ready.eq(pack.i.ready),
            buffer.i.valid.eq(pack.o.valid),
            buffer.i.payload.eq(pack.o.payload.data),
            pack.o.ready.eq(buffer.i.ready),
            mover.i_credit.eq(buffer.i.valid & buffer.i.ready),
            mover.i_tail.eq(self.i_tail),
            mover.i_stop.eq(self.i_stop),
            announced.eq(bursts.o.valid & bursts.i.ready),
            self.o_idle.eq((waiting == 0) & mover.o_idle),
            self.o_bus_idle.eq(mover.o_idle),
        ]
        m.d.sync += waiting.eq(waiting + taken - announced)
        return ResetInserter(self.i_clear)(m)
