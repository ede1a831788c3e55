"""Output FIFOs to memory."""

from amaranth import Elaboratable, Module
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.axdimm.config import AdamKernelConfig
from nearstep_hw.axdimm.fault import FaultLayout, mover_fault
from nearstep_hw.axdimm.registers import ErrorCause, Stream
from nearstep_hw.axi.burst import id_width
from nearstep_hw.axi.schedule import BlockSchedule
from nearstep_hw.axi.signature import Axi4WriteSignature
from nearstep_hw.axi.window import WindowChecker, WindowSignature
from nearstep_hw.axi.writer import WriteMover
from nearstep_hw.stream.fifo import StreamFifo


class StorePath(wiring.Component):
    """Stores blocks of the arrays, in turn, from a FIFO each of two blocks.

    Parameters
    ----------
    config : of the kernel.

    Members
    -------
    bus : AW, W and B.
    window : the windows.
    i_base, i_beats : of the arrays; held while `o_idle` is low.
    i_tail : byte strobes of the last beat of each array.
    i_use : a bit for each array that the run has; held while `o_idle` is low. If the kernel has
        several rules.
    i_launch : begins.
    i_<array> : beats.
    i_made : a beat of every input is put in this cycle.
    o_block_done : a bit for each array: a block of it is written and acknowledged.
    o_fault : a fault in this cycle; cause 0 is none.
    i_stop : announces nothing more.
    o_idle : nothing is outstanding.
    i_clear : forgets everything; only when `o_idle`.
    """

    def __init__(self, config: AdamKernelConfig) -> None:
        self.config = config
        self.bursts_ahead = 1 << ceil_log2(config.bursts_ahead)
        self.schedule = BlockSchedule(
            streams=len(config.states),
            address_width=config.address_width,
            beat_bytes=config.beat_bytes,
            block_beats=config.block_beats,
            burst_beats=config.burst_beats,
            optional=len(config.rules) > 1,
        )
        super().__init__(
            {
                "bus": Out(
                    Axi4WriteSignature(
                        address_width=config.address_width,
                        data_width=config.data_width,
                        id_width=id_width(len(config.states)),
                    )
                ),
                "window": In(WindowSignature()).array(config.windows),
                "i_base": In(config.address_width).array(len(config.states)),
                "i_beats": In(self.schedule.i_beats.shape()),
                "i_tail": In(config.beat_bytes),
                **({"i_use": In(len(config.states))} if self.schedule.optional else {}),
                "i_launch": In(1),
                **{f"i_{name}": In(stream.Signature(config.data_width)) for name in config.states},
                "i_made": In(1),
                "o_block_done": Out(len(config.states)),
                "o_fault": Out(FaultLayout()),
                "i_stop": In(1),
                "o_idle": Out(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        config = self.config
        m.submodules.schedule = schedule = self.schedule
        m.submodules.checker = checker = WindowChecker(
            schedule.o.payload.shape(),
            beat_bytes=config.beat_bytes,
            windows=config.windows,
            write=True,
        )
        m.submodules.mover = mover = WriteMover(
            streams=len(config.states),
            address_width=config.address_width,
            beat_bytes=config.beat_bytes,
            burst_beats=config.burst_beats,
            buffer_beats=config.fifo_beats + 1,  # the FIFO's memory and its output register
            bursts_ahead=self.bursts_ahead,
        )

        wiring.connect(m, schedule.o, checker.i)
        wiring.connect(m, checker.o, mover.i)
        wiring.connect(m, wiring.flipped(self.bus), mover.bus)
        for mine, its in zip(self.window, checker.window, strict=True):
            wiring.connect(m, wiring.flipped(mine), its)
        for base, scheduled in zip(self.i_base, schedule.i_base, strict=True):
            m.d.comb += scheduled.eq(base)
        if schedule.optional:
            m.d.comb += schedule.i_use.eq(self.i_use)
        m.d.comb += [
            schedule.i_start.eq(self.i_launch),
            schedule.i_beats.eq(self.i_beats),
            schedule.i_clear.eq(self.i_stop | self.i_clear),
            checker.i_clear.eq(self.i_stop | self.i_clear),
            mover.i_stop.eq(self.i_stop),
            mover.i_gain.eq(self.i_made),
            mover.i_tail.eq(self.i_tail),
            mover.i_clear.eq(self.i_clear),
            self.o_block_done.eq(mover.o_block_done),
            self.o_idle.eq(mover.o_idle),
        ]
        for name, sink in zip(config.states, mover.data, strict=True):
            m.submodules[f"fifo_{name}"] = fifo = StreamFifo(
                config.data_width, depth=config.fifo_beats
            )
            wiring.connect(m, wiring.flipped(getattr(self, f"i_{name}")), fifo.i)
            wiring.connect(m, fifo.o, sink)
            m.d.comb += fifo.i_clear.eq(self.i_clear)
        m.d.comb += self.o_fault.eq(
            mover_fault(
                m,
                bus=mover.fault,
                refused=checker.o_refused,
                burst=checker.o_burst,
                response=ErrorCause.WRITE_RESPONSE,
                streams=[Stream[f"{name.upper()}_WRITE"] for name in config.states],
            )
        )
        return m
