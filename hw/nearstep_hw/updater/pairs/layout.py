"""Compressed gradients: streams of index and value pairs."""

from amaranth import Elaboratable, Module, Mux, Signal, unsigned
from amaranth.hdl import Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.fp import convert
from nearstep_hw.fp.pipeline import Pipeline
from nearstep_spec.fp import BF16, FP16, FP32
from nearstep_spec.updater.compression import PairCause, ValueFormat

__all__ = [
    "CAUSE_WIDTH",
    "COUNT_WIDTH",
    "INDEX_WIDTH",
    "PairLayout",
    "PairReader",
    "WordsLayout",
]

INDEX_WIDTH = 32  # an index is a u32
COUNT_WIDTH = 32  # of counts of pairs and elements: up to 2**32 - 1
HALF_WIDTH = FP16.width


CAUSE_WIDTH = max(PairCause).bit_length()


class WordsLayout(data.StructLayout):
    """A beat as in memory: `words`, and whether the source ends with the beat (`last`)."""

    def __init__(self, words: int) -> None:
        super().__init__({"words": data.ArrayLayout(32, words), "last": 1})


class PairLayout(data.StructLayout):
    """A beat of pairs.

    Members
    -------
    index, value : of each pair; values are binary32.
    keep : valid pairs; a prefix.
    end : the last beat of a run.
    cause : a `PairCause`; other than 0 only with `end`.
    position : with `cause`, the number of pairs before the first that is missing or wrong.
    """

    def __init__(self, pairs: int) -> None:
        super().__init__(
            {
                "index": data.ArrayLayout(INDEX_WIDTH, pairs),
                "value": data.ArrayLayout(FP32.width, pairs),
                "keep": unsigned(pairs),
                "end": 1,
                "cause": CAUSE_WIDTH,
                "position": COUNT_WIDTH,
            }
        )


class PairReader(wiring.Component):
    """Joins the indices and the values of a run, and widens the values to binary32.

    A beat of values holds `pairs` values in FP32, twice as many in FP16 or BF16; the first are in
    the low bits. Beats after the announced number of pairs are not consumed; later words in the
    last beat are ignored. If either source ends early, the run ends with the complete pairs and the
    cause `TRUNCATED`. A run of no pairs consumes nothing and outputs one empty beat.

    *Timing*: one beat a cycle, `latency` cycles. The pipeline stalls while a beat waits at the
    output.

    *Numerics*: widening is exact; a NaN becomes the default NaN of binary32. FP32 values are
    unchanged.

    Parameters
    ----------
    pairs : pairs in a beat, even.

    Members
    -------
    i_index, i_value : In(stream of `WordsLayout`).
    o : Out(stream of `PairLayout`).
    i_launch : begins a run, out of reset.
    i_pairs : announced number of pairs; stable during a run.
    i_format : a `ValueFormat`; stable during a run.
    i_dry : only indices are read, values are undefined; stable during a run.
    """

    latency = convert.DEPTH

    def __init__(self, *, pairs: int) -> None:
        if not isinstance(pairs, int) or pairs < 2 or pairs % 2:
            raise ValueError(f"Pairs of a beat must be an even positive integer, not {pairs!r}")
        self.pairs = pairs
        super().__init__(
            {
                "i_index": In(stream.Signature(WordsLayout(pairs))),
                "i_value": In(stream.Signature(WordsLayout(pairs))),
                "o": Out(stream.Signature(PairLayout(pairs))),
                "i_launch": In(1),
                "i_pairs": In(COUNT_WIDTH),
                "i_format": In(range(len(ValueFormat))),
                "i_dry": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        pairs = self.pairs
        running = Signal()
        left = Signal(COUNT_WIDTH)  # pairs not taken yet
        upper = Signal()  # the upper half of the beat of values is in turn
        halves, whole_value, short = Signal(), Signal(), Signal()
        empty, final, there = Signal(), Signal(), Signal()
        advance, give, take = Signal(), Signal(), Signal()
        pipe = Pipeline(m, en=advance)

        index, value = self.i_index.payload, self.i_value.payload
        m.d.comb += [
            advance.eq(self.o.ready | ~self.o.valid),
            halves.eq(self.i_format != ValueFormat.FP32),
            empty.eq(left == 0),
            final.eq(left <= pairs),
            whole_value.eq(~halves | upper | final),
            short.eq(~final & (index.last | (value.last & whole_value & ~self.i_dry))),
            there.eq(self.i_index.valid & (self.i_value.valid | self.i_dry)),
            give.eq(running & (empty | there)),
            take.eq(advance & running & ~empty & there),
            self.i_index.ready.eq(take),
            self.i_value.ready.eq(take & whole_value & ~self.i_dry),
        ]
        with m.If(advance & give):
            m.d.sync += left.eq(left - pairs)
            m.d.sync += upper.eq(halves & ~upper)
            m.d.sync += running.eq(~(final | short))
        with m.If(self.i_launch):
            m.d.sync += [running.eq(1), left.eq(self.i_pairs)]

        def later(each: Value, name: str) -> Value:
            return pipe.at(pipe.wrap(each, 0, name), self.latency)

        beat = self.o.payload
        keep = [Mux(final, lane < left, 1) for lane in range(pairs)]
        m.d.comb += [
            self.o.valid.eq(pipe.valid(give, self.latency)),
            beat.end.eq(later(final | short, "end")),
            beat.cause.eq(later(Mux(short, PairCause.TRUNCATED, PairCause.NONE), "cause")),
        ]
        for lane in range(pairs):
            m.d.comb += [
                beat.keep[lane].eq(later(keep[lane], f"keep{lane}")),
                beat.index[lane].eq(later(index.words[lane], f"index{lane}")),
                beat.value[lane].eq(self._widened(pipe, value.words, upper, lane)),
            ]
        return m

    def _widened(self, pipe: Pipeline, words: data.View, upper: Value, lane: int) -> Value:
        at = self.latency
        wide = pipe.at(pipe.wrap(words[lane], 0, f"wide{lane}"), at)
        low, high = (
            words[word][HALF_WIDTH * (lane % 2) :][:HALF_WIDTH]
            for word in (lane // 2, (self.pairs + lane) // 2)
        )
        half = pipe.wrap(Mux(upper, high, low), 0, f"half{lane}")
        fp16, bf16 = (
            pipe.at(convert.convert(pipe, source, FP32, half, depth=at, flags=False).z, at)
            for source in (FP16, BF16)
        )
        narrow = Mux(self.i_format == ValueFormat.FP16, fp16, bf16)
        return Mux(self.i_format == ValueFormat.FP32, wide, narrow)
