"""Joins the operands of the ALUs, beat by beat, in the order of the steps."""

from amaranth import Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.coarse.entry import StepLayout
from nearstep_hw.coarse.reduce import ReduceLayout
from nearstep_spec.coarse.config import BEAT_ELEMENTS, CoarseConfig


class StepSequencer(wiring.Component):
    """Joins received and local values of each step; local values beyond the tensor are zero.

    *Timing*: combinational; a beat a cycle, without a gap between steps.

    Members
    -------
    i : steps.
    received, local : beats of the steps that need them.
    o : beats for the ALUs.
    writes : steps that write, each in the cycle of its first beat.
    o_stall_local, o_stall_receive, o_stall_write : the sequencer stalls on this stream.
    i_clear : clears all state.
    """

    def __init__(self, config: CoarseConfig) -> None:
        self.config = config
        width = 32 * config.alus
        super().__init__(
            {
                "i": In(stream.Signature(StepLayout(config))),
                "received": In(stream.Signature(width)),
                "local": In(stream.Signature(width)),
                "o": Out(stream.Signature(ReduceLayout(config.alus))),
                "writes": Out(stream.Signature(StepLayout(config))),
                "o_stall_local": Out(1),
                "o_stall_receive": Out(1),
                "o_stall_write": Out(1),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        shift = exact_log2(BEAT_ELEMENTS // self.config.alus)
        step, control = self.i.payload, self.o.payload.control
        beat = Signal(len(step.wire_beats) + shift)  # of the ALUs
        exists = Signal()
        last = Signal()
        announces = Signal()
        lacks_local = Signal()
        lacks_received = Signal()
        fires = Signal()

        m.d.comb += [
            exists.eq((beat >> shift) < step.beats),
            last.eq(beat + 1 == step.wire_beats << shift),
            announces.eq(step.write & (beat == 0) & (step.beats != 0)),
            lacks_local.eq(step.local & exists & ~self.local.valid),
            lacks_received.eq(step.receive & ~self.received.valid),
            self.o.valid.eq(
                self.i.valid & ~lacks_local & ~lacks_received & (~announces | self.writes.ready)
            ),
            fires.eq(self.o.valid & self.o.ready),
            self.o.payload.received.eq(self.received.payload),
            self.o.payload.local.eq(Mux(exists, self.local.payload, 0)),
            control.receive.eq(step.receive),
            control.local.eq(step.local),
            control.final.eq(step.final),
            control.send.eq(step.send),
            control.write.eq(step.write & exists),
            control.last.eq(last),
            control.end.eq(last & step.end),
            self.received.ready.eq(fires & step.receive),
            self.local.ready.eq(fires & step.local & exists),
            self.writes.valid.eq(fires & announces),
            self.writes.payload.eq(step),
            self.i.ready.eq(fires & last),
            self.o_stall_local.eq(self.i.valid & lacks_local),
            self.o_stall_receive.eq(self.i.valid & lacks_received & ~lacks_local),
            self.o_stall_write.eq(
                self.i.valid & announces & ~self.writes.ready & ~lacks_local & ~lacks_received
            ),
        ]
        with m.If(fires):
            m.d.sync += beat.eq(Mux(last, 0, beat + 1))
        return ResetInserter(self.i_clear)(m)
