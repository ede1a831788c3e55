"""LocalBuf: prefetch of the device's own values, in the order of use."""

from amaranth import Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2, exact_log2

from nearstep_hw.axi.fault import BusFaultSignature
from nearstep_hw.axi.reader import ReadMover
from nearstep_hw.axi.signature import Axi4ReadSignature, connect_channels
from nearstep_hw.coarse.entry import StepLayout
from nearstep_hw.coarse.range_bursts import RangeBursts
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_hw.stream.gearbox import StreamSplit
from nearstep_spec.coarse.config import BEAT_BYTES, BURST_BEATS, CoarseConfig

BURSTS_AHEAD = 16


class LocalLoad(wiring.Component):
    """Prefetches the beats of each step within the tensor, as far ahead as LocalBuf has space.

    *Timing*: a memory beat a cycle; the first core beat three cycles after its transfer on R.

    Members
    -------
    bus : AR and R; RREADY is always high.
    i : steps that need the device's own values.
    i_source : byte address of the tensor, held.
    o : elements of these beats, as many as the ALUs take in a cycle.
    fault : a beat got a response other than OKAY; with the address of its burst.
    i_stop : issues no more bursts.
    o_idle : no burst is outstanding.
    i_clear : clears all state; only when idle.
    """

    def __init__(self, config: CoarseConfig) -> None:
        self.config = config
        self.bursts = RangeBursts(config)
        self.mover = ReadMover(
            streams=1,
            address_width=config.address_width,
            beat_bytes=BEAT_BYTES,
            burst_beats=BURST_BEATS,
            landing_beats=config.local_beats,
            bursts_ahead=BURSTS_AHEAD,
        )
        self.split = StreamSplit(
            piece_width=32 * config.alus, factor=8 * BEAT_BYTES // (32 * config.alus)
        )
        super().__init__(
            {
                "bus": Out(
                    Axi4ReadSignature(
                        address_width=config.address_width, data_width=8 * BEAT_BYTES, id_width=1
                    )
                ),
                "i": In(stream.Signature(StepLayout(config))),
                "i_source": In(config.address_width),
                "o": Out(stream.Signature(32 * config.alus)),
                "fault": Out(BusFaultSignature(streams=1, address_width=config.address_width)),
                "i_stop": In(1),
                "o_idle": Out(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.bursts = bursts = self.bursts
        m.submodules.mover = mover = self.mover
        m.submodules.buffer = buffer = StreamFifo(8 * BEAT_BYTES, depth=self.config.local_beats)
        m.submodules.split = split = self.split
        step = self.i.payload
        exists = step.beats != 0

        connect_channels(m, mover.bus, self.bus)
        wiring.connect(m, bursts.o, mover.i)
        m.d.comb += [
            bursts.i.valid.eq(self.i.valid & exists),
            bursts.i.payload.at.eq((self.i_source >> exact_log2(BEAT_BYTES)) + step.at),
            bursts.i.payload.beats.eq(step.beats),
            self.i.ready.eq(bursts.i.ready | ~exists),
            mover.i_stop.eq(self.i_stop),
            buffer.i.valid.eq(mover.o_beat),
            buffer.i.payload.eq(self.bus.r.payload.data),
            mover.i_credit.eq(buffer.o.valid & buffer.o.ready),
            split.i.valid.eq(buffer.o.valid),
            split.i.payload.data.eq(buffer.o.payload),
            buffer.o.ready.eq(split.i.ready),
            self.o.valid.eq(split.o.valid),
            self.o.payload.eq(split.o.payload.data),
            split.o.ready.eq(self.o.ready),
            self.o_idle.eq(mover.o_idle),
            self.fault.valid.eq(mover.fault.valid),
            self.fault.stream.eq(mover.fault.stream),
            self.fault.response.eq(mover.fault.response),
            self.fault.address.eq(self._answered(m)),
        ]
        return ResetInserter(self.i_clear)(m)

    def _answered(self, m: Module) -> Signal:
        """Return the address of the current burst on R; the mover tracks only consecutive
        addresses.
        """
        m.submodules.asked = asked = Memory(
            shape=self.config.address_width, depth=BURSTS_AHEAD, init=[]
        )
        write_port = asked.write_port()
        read_port = asked.read_port(domain="comb")
        issued = Signal(ceil_log2(BURSTS_AHEAD))
        answered = Signal(ceil_log2(BURSTS_AHEAD))
        m.d.comb += [
            write_port.addr.eq(issued),
            write_port.data.eq(self.bursts.o.payload.address),
            write_port.en.eq(self.bursts.o.valid & self.bursts.o.ready),
            read_port.addr.eq(answered),
        ]
        with m.If(write_port.en):
            m.d.sync += issued.eq(issued + 1)
        with m.If(self.bus.r.valid & self.bus.r.payload.last):
            m.d.sync += answered.eq(answered + 1)
        return read_port.data
