"""Joins the operands of the ALUs, beat by beat, in the order of the steps."""

from typing import NamedTuple

from amaranth import Elaboratable, Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.coarse.entry import StepLayout
from nearstep_hw.coarse.reduce import ReduceLayout
from nearstep_hw.coarse.wire import MEMBER_BITS
from nearstep_spec.coarse.config import BEAT_ELEMENTS, CoarseConfig


class Turn(NamedTuple):
    """Control of a beat of the ALUs, as of `ControlLayout`."""

    receive: Value
    local: Value
    send: Value
    write: Value
    final: Value
    last: Value


class StepSequencer(wiring.Component):
    """Joins received and local values of each step; local values beyond the tensor are zero.

    In an exact sum a beat of a list has a turn for each received addend, then one for the local
    one, which shares the turn before if they may pass apart, and are of one entry.

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
                "o": Out(stream.Signature(ReduceLayout(config.alus, exact=bool(config.exact)))),
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
        starts = step.write & (beat == 0)
        passes, done = fires, fires & last  # to the next beat, and step
        turn = Turn(step.receive, step.local, step.send, step.write, step.final, last)
        combined = turn.receive
        if self.config.exact:
            turn, begins, ends = self._turns(m, fires, last, exists)
            starts, passes, done = starts & begins, passes & ends, done & ends
            apart = step.apart & turn.receive & turn.local
            combined = turn.receive & ~apart
            m.d.comb += control.apart.eq(apart)

        m.d.comb += [
            exists.eq((beat >> shift) < step.beats),
            last.eq(beat + 1 == step.wire_beats << shift),
            announces.eq(starts & (step.beats != 0)),
            lacks_local.eq(turn.local & exists & ~self.local.valid),
            lacks_received.eq(turn.receive & ~self.received.valid),
            self.o.valid.eq(
                self.i.valid & ~lacks_local & ~lacks_received & (~announces | self.writes.ready)
            ),
            fires.eq(self.o.valid & self.o.ready),
            self.o.payload.received.eq(self.received.payload),
            self.o.payload.local.eq(Mux(exists, self.local.payload, 0)),
            control.receive.eq(combined),
            control.local.eq(turn.local),
            control.final.eq(turn.final),
            control.send.eq(turn.send),
            control.write.eq(turn.write & exists),
            control.last.eq(turn.last),
            control.end.eq(last & step.end),
            self.received.ready.eq(fires & turn.receive),
            self.local.ready.eq(fires & turn.local & exists),
            self.writes.valid.eq(fires & announces),
            self.writes.payload.eq(step),
            self.i.ready.eq(done),
            self.o_stall_local.eq(self.i.valid & lacks_local),
            self.o_stall_receive.eq(self.i.valid & lacks_received & ~lacks_local),
            self.o_stall_write.eq(
                self.i.valid & announces & ~self.writes.ready & ~lacks_local & ~lacks_received
            ),
        ]
        with m.If(passes):
            m.d.sync += beat.eq(Mux(last, 0, beat + 1))
        return ResetInserter(self.i_clear)(m)

    def _turns(
        self, m: Module, fires: Signal, last: Signal, exists: Signal
    ) -> tuple[Turn, Value, Value]:
        """Return the turn of a beat, and whether it is the first one and the last one."""
        step, control = self.i.payload, self.o.payload.control
        turn = Signal(MEMBER_BITS)
        place = Signal(len(step.wire_beats) + exact_log2(BEAT_ELEMENTS // self.config.alus))
        after, size = (Signal(len(place) + 1, name=n) for n in ("after", "size"))
        own, ends, fills, sums, shares = (
            Signal(name=n) for n in ("own", "ends", "fills", "sums", "shares")
        )
        m.d.comb += [
            size.eq(step.wire_beats << len(place) - len(step.wire_beats)),
            shares.eq(step.apart & (turn + 1 == step.addends) & (place + 1 != size)),
            own.eq(shares | (turn == step.addends)),
            ends.eq(~step.list | own),
            after.eq(place + 1 + shares),
            fills.eq(after == size),
            sums.eq(step.list & step.final),
            control.sum.eq(sums),
            control.closes.eq(own),
            control.stored.eq(step.write & exists),
        ]
        with m.If(fires & step.list):
            m.d.sync += [turn.eq(Mux(own, 0, turn + 1)), place.eq(Mux(fills, 0, after))]
        return (
            Turn(
                receive=step.receive & ~(step.list & own & ~shares),
                local=step.local & ends,
                send=step.send & ~sums,
                write=step.write & ~sums,
                final=step.final & ~sums,
                last=Mux(step.list & ~sums, fills, last),
            ),
            turn == 0,
            ends,
        )
