"""Split of beats of pairs into smaller ones."""

from amaranth import Array, Cat, Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.updater.pairs.layout import PairLayout
from nearstep_spec.updater.compression import PairCause

__all__ = ["PairSplit"]


class PairSplit(wiring.Component):
    """Splits a beat of pairs into parts, the first pairs first.

    Parts without pairs, except the first, are omitted; the end of a run, its cause and position
    are in the last part.

    *Timing*: combinational; one part a cycle.

    Parameters
    ----------
    pairs, part : pairs of a beat, and most pairs of a part.

    Members
    -------
    i, o : streams of `PairLayout`.
    """

    def __init__(self, *, pairs: int, part: int) -> None:
        if not isinstance(part, int) or part < 1:
            raise ValueError(f"Pairs of a part must be a positive integer, not {part!r}")
        self.pairs = pairs
        self.part = part
        super().__init__(
            {
                "i": In(stream.Signature(PairLayout(pairs))),
                "o": Out(stream.Signature(PairLayout(part))),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        beat, given, part = self.i.payload, self.o.payload, self.part
        firsts = range(0, self.pairs, part)
        turn = Signal(range(len(firsts)))
        # `keep` is a prefix: this part is the last if the first pair of the next is invalid.
        more = Signal()
        m.d.comb += more.eq(Array([*(beat.keep[first] for first in firsts[1:]), 0])[turn])
        for lane in range(part):
            lanes = [first + lane for first in firsts if first + lane < self.pairs]
            m.d.comb += [
                given.index[lane].eq(Array(beat.index[each] for each in lanes)[turn]),
                given.value[lane].eq(Array(beat.value[each] for each in lanes)[turn]),
            ]
        keeps = [Cat(beat.keep[first : first + part]) for first in firsts]
        m.d.comb += [
            given.keep.eq(Array(keeps)[turn]),
            given.end.eq(beat.end & ~more),
            given.cause.eq(Mux(more, PairCause.NONE, beat.cause)),
            given.position.eq(beat.position),
            self.o.valid.eq(self.i.valid),
            self.i.ready.eq(self.o.ready & ~more),
        ]
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += turn.eq(Mux(more, turn + 1, 0))
        return m
