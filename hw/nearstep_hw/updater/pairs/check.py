"""Check of range and order of indices."""

from amaranth import Elaboratable, Module, Mux, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.updater.pairs.layout import COUNT_WIDTH, PairLayout
from nearstep_spec.updater.compression import PairCause

__all__ = ["PairCheck"]


class PairCheck(wiring.Component):
    """Passes pairs up to the first that is out of range or out of order, and ends the run there.

    The beat with the wrong pair has `end`, cause and position, and keeps the pairs before. No beat
    passes after an end until reset.

    *Timing*: one beat a cycle, two cycles of latency. The pipeline stalls while a beat waits at
    the output.

    Parameters
    ----------
    pairs : pairs in a beat.
    group : elements, a power of two, within which the order is free: 1 requires sorted indices.
    choice : adds `i_sorted`.

    Members
    -------
    i, o : streams of `PairLayout`.
    i_count : elements; indices must be below. Stable during a run.
    i_sorted : indices must be sorted; stable during a run. If `choice`.
    o_repeats : passed pairs with the index of the pair before.
    """

    def __init__(self, *, pairs: int, group: int, choice: bool = False) -> None:
        self.pairs = pairs
        self.choice = choice
        self._shift = exact_log2(group)
        super().__init__(
            {
                "i": In(stream.Signature(PairLayout(pairs))),
                "o": Out(stream.Signature(PairLayout(pairs))),
                "i_count": In(COUNT_WIDTH),
                **({"i_sorted": In(1)} if choice else {}),
                "o_repeats": Out(COUNT_WIDTH),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        pairs, shift = self.pairs, self._shift
        advance = Signal()
        ended = Signal()
        before = Signal(self.i.payload.index[0].shape())  # the last index of the beat before
        has_before = Signal()
        beat = Signal(PairLayout(pairs))
        full = Signal()
        beyond, early, same = (Signal(pairs, name=name) for name in ("beyond", "early", "same"))
        taken = Signal(COUNT_WIDTH)  # pairs of the beats before `beat`

        m.d.comb += [
            advance.eq(self.o.ready | ~self.o.valid),
            self.i.ready.eq(advance & ~ended),
        ]
        given = self.i.payload
        with m.If(advance):
            m.d.sync += full.eq(self.i.valid & ~ended)
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += [
                beat.eq(given),
                ended.eq(given.end),
                has_before.eq(1),
                before.eq(given.index[pairs - 1]),
            ]
            for lane in range(pairs):
                previous = given.index[lane - 1] if lane else before
                follows = given.keep[lane] & (has_before if lane == 0 else 1)
                earlier = given.index[lane][shift:] < previous[shift:]
                if self.choice:
                    earlier = Mux(self.i_sorted, given.index[lane] < previous, earlier)
                m.d.sync += [
                    beyond[lane].eq(given.keep[lane] & (given.index[lane] >= self.i_count)),
                    early[lane].eq(follows & earlier),
                    same[lane].eq(follows & (given.index[lane] == previous)),
                ]

        wrong, good = Signal(pairs), Signal(pairs)
        passed = Signal(range(pairs + 1))
        stopped = Signal()
        m.d.comb += wrong.eq(beyond | early)
        for lane in range(pairs):
            m.d.comb += good[lane].eq(beat.keep[lane] & ~wrong[: lane + 1].any())
        first = wrong & ~(wrong - 1)[:pairs]
        cause = Mux(
            wrong.any(),
            Mux((beyond & first).any(), PairCause.RANGE, PairCause.ORDER),
            beat.cause,
        )
        m.d.comb += passed.eq(sum(good[lane] for lane in range(pairs)))
        with m.If(advance):
            m.d.sync += [
                self.o.valid.eq(full & ~stopped),
                self.o.payload.eq(beat),
                self.o.payload.keep.eq(good),
                self.o.payload.end.eq(beat.end | wrong.any()),
                self.o.payload.cause.eq(cause),
                self.o.payload.position.eq(taken + passed),
            ]
            with m.If(full & ~stopped):
                m.d.sync += [
                    taken.eq(taken + pairs),
                    stopped.eq(beat.end | wrong.any()),
                    self.o_repeats.eq(
                        self.o_repeats + sum((same & good)[lane] for lane in range(pairs))
                    ),
                ]
        return m
