"""Merge of sorted pairs into the gradient stream, without a buffer."""

from itertools import pairwise

from amaranth import Cat, Const, Elaboratable, Module, Mux, Signal
from amaranth.hdl import Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.updater.pairs.layout import CAUSE_WIDTH, COUNT_WIDTH, PairLayout
from nearstep_spec.fp import FP32
from nearstep_spec.updater.compression import PairCause

__all__ = ["PairMerge"]


class PairMerge(wiring.Component):
    """Converts sorted pairs to dense beats: elements without a pair are zero; of equal indices the
    last one counts.

    A dense beat is output when a pair of a later beat, or the end of the pairs, is known. After a
    beat of pairs with a cause the output ends, with the dense beat before that of the last good
    pair.

    *Timing*: a dense beat takes one cycle, or one for each beat of pairs with values for it, unless
    pairs are late. The pipeline stalls while a dense beat waits at the output.

    Parameters
    ----------
    lanes : elements of a dense beat, a power of two.
    pairs : pairs of a beat.
    cut : a register after the comparisons; each step takes two cycles.

    Members
    -------
    i : In(stream of `PairLayout`), sorted and in range, see `PairCheck`.
    o : Out(stream), lane k in bits 32 k to 32 k + 31. Lanes behind the last element are zero.
    i_launch : begins a run, out of reset.
    i_count : elements; stable during a run.
    o_done : all beats are taken.
    o_cause, o_position : why, and after how many pairs, a run ended early.
    """

    def __init__(self, *, lanes: int, pairs: int, cut: bool = False) -> None:
        self.cut = cut
        self.lanes = lanes
        self.pairs = pairs
        super().__init__(
            {
                "i": In(stream.Signature(PairLayout(pairs))),
                "o": Out(stream.Signature(data.ArrayLayout(FP32.width, lanes))),
                "i_launch": In(1),
                "i_count": In(COUNT_WIDTH),
                "o_done": Out(1),
                "o_cause": Out(CAUSE_WIDTH),
                "o_position": Out(COUNT_WIDTH),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        lanes, pairs, low = self.lanes, self.pairs, exact_log2(self.lanes)
        running, finished = Signal(), Signal()
        beats = Signal(COUNT_WIDTH - low + 1)
        number = Signal(COUNT_WIDTH - low + 1)  # of the current dense beat
        held = Signal(PairLayout(pairs))  # `keep` is what is left of it
        partial = Signal(data.ArrayLayout(FP32.width, lanes))  # of the beat, from pairs before

        here, rest = Signal(pairs), Signal(pairs)
        # Operands of the comparisons change only in the cycle after `act`.
        act = Signal()
        to = m.d.sync if self.cut else m.d.comb
        if self.cut:
            m.d.sync += act.eq(~act)
        else:
            m.d.comb += act.eq(1)
        found = Signal(pairs)
        left = Signal()  # pairs of `held` belong to later beats
        for k in range(pairs):
            m.d.comb += found[k].eq(held.keep[k] & (held.index[k][low:] == number))
        to += [here.eq(found), left.eq((held.keep & ~found).any())]
        m.d.comb += rest.eq(held.keep & ~here)
        merged = Signal(data.ArrayLayout(FP32.width, lanes))
        for lane in range(lanes):
            m.d.comb += merged[lane].eq(self._merged(here, held, partial[lane], lane))

        given, space = self.i.payload, Signal()
        complete, take, emit = Signal(), Signal(), Signal()
        arrived, at_end = Signal(), Signal()
        to += [arrived.eq(self.i.valid), at_end.eq(number == beats)]
        to += complete.eq(given.keep[0] & (given.index[0][low:] != number))
        m.d.comb += [
            space.eq(self.o.ready | ~self.o.valid),
            self.i.ready.eq(take),
        ]
        with m.If(running & act):
            with m.If(left):
                m.d.comb += emit.eq(space)
                with m.If(space):
                    m.d.sync += held.keep.eq(rest)
            with m.Elif(~held.end):
                m.d.comb += [
                    take.eq(arrived & (space | ~complete)),
                    emit.eq(take & complete),
                ]
                with m.If(take):
                    m.d.sync += [held.eq(given), partial.eq(merged)]
            with m.Elif(held.cause != PairCause.NONE):
                m.d.sync += [
                    running.eq(0),
                    self.o_cause.eq(held.cause),
                    self.o_position.eq(held.position),
                ]
            with m.Elif(at_end):
                m.d.sync += [running.eq(0), finished.eq(1)]
            with m.Else():
                m.d.comb += emit.eq(space)
                with m.If(space):
                    m.d.sync += held.keep.eq(0)

        with m.If(emit):
            m.d.sync += [
                self.o.valid.eq(1),
                self.o.payload.eq(merged),
                number.eq(number + 1),
                partial.eq(0),
            ]
        with m.Elif(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        with m.If(self.i_launch):
            m.d.sync += [running.eq(1), beats.eq((self.i_count + (lanes - 1)) >> low)]
        m.d.comb += self.o_done.eq(finished & ~self.o.valid)
        return m

    def _merged(self, here: Value, held: data.View, before: Value, lane: int) -> Value:
        low = exact_log2(self.lanes)
        wanted = [here[k] & (held.index[k][:low] == lane) for k in range(self.pairs)]
        # Sorted pairs of one lane are neighbours: the last is the one without a successor.
        last = [hit & ~after for hit, after in pairwise([*wanted, Const(0, 1)])]
        chosen: Value = Mux(Cat(wanted).any(), 0, before)
        for k, hit in enumerate(last):
            chosen = chosen | (held.value[k] & hit.replicate(FP32.width))
        return chosen
