"""Decompression: streams of index and value pairs, or of records, to a dense gradient stream."""

from collections.abc import Sequence

from amaranth import Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.hdl import Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.stream.slice import StreamSlice
from nearstep_hw.updater.pairs.check import PairCheck
from nearstep_hw.updater.pairs.chunk_buffer import ChunkBuffer
from nearstep_hw.updater.pairs.layout import (
    CAUSE_WIDTH,
    COUNT_WIDTH,
    PairLayout,
    PairReader,
    WordsLayout,
)
from nearstep_hw.updater.pairs.merge import PairMerge
from nearstep_hw.updater.pairs.scatter import ChunkDrain, PairScatter
from nearstep_hw.updater.pairs.split import PairSplit
from nearstep_hw.updater.pairs.user import RecordCheck, UserStage
from nearstep_spec.fp import FP32
from nearstep_spec.updater.compression import PairCause, ValueFormat
from nearstep_spec.updater.decompressor import Decompressor as UserDecompressor

__all__ = ["FUSED", "SCATTER", "SCATTERED", "ChunkScatter", "Decompressor"]

FUSED, SCATTER = "fused", "scatter"
SCATTERED = 8
"""Pairs distributed in a cycle. More pairs widen the multiplexers of all banks: 16 pairs distribute
random indices to 16 banks a quarter faster, for twice the area."""


class ChunkScatter(wiring.Component):
    """Converts pairs grouped by chunk to dense beats, through two chunk buffers.

    *Timing*: while one chunk is filled, the previous chunk is output at one dense beat a cycle. Up
    to `SCATTERED` pairs of a beat take one cycle if at most two of them are in one bank, see
    `PairScatter`. After a run that failed, or after `rst`, the next run begins `chunk / lanes`
    cycles later: both buffers are cleared first.

    Parameters
    ----------
    lanes, pairs, chunk : as of `Decompressor`.

    Members
    -------
    i : In(stream of `PairLayout`), chunks in order, all in range, see `PairCheck`.
    o : Out(stream), the dense beats.
    i_start : clears all state.
    i_launch, o_launch : request, in the cycle of `i_start`, and begin of a run.
    i_count : elements; stable during a run.
    o_done, o_cause, o_position, o_duplicates : as of `Decompressor`.
    """

    def __init__(self, *, lanes: int, pairs: int, chunk: int) -> None:
        self.lanes = lanes
        if exact_log2(chunk) <= exact_log2(lanes):
            raise ValueError(f"A chunk must have at least {2 * lanes} elements, not {chunk!r}")
        rows = chunk // lanes
        part = min(pairs, SCATTERED)
        self._split = PairSplit(pairs=pairs, part=part)
        self._scatter = PairScatter(lanes=lanes, pairs=part, chunk=chunk)
        self._drain = ChunkDrain(lanes=lanes, rows=rows)
        self._buffers = [ChunkBuffer(banks=lanes, rows=rows) for _ in range(2)]
        super().__init__(
            {
                "i": In(stream.Signature(PairLayout(pairs))),
                "o": Out(self._drain.o.signature),
                "i_start": In(1),
                "i_launch": In(1),
                "o_launch": Out(1),
                "i_count": In(COUNT_WIDTH),
                "o_done": Out(1),
                "o_cause": Out(CAUSE_WIDTH),
                "o_position": Out(COUNT_WIDTH),
                "o_duplicates": Out(COUNT_WIDTH),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        split, scatter, drain = self._split, self._scatter, self._drain
        for name, part in {"scatter": scatter, "drain": drain}.items():
            m.submodules[name] = ResetInserter(self.i_start)(part)
            m.d.comb += [part.i_launch.eq(self.o_launch), part.i_count.eq(self.i_count)]
        # A reset during a run may have left pairs in the buffers: `rst` does not clear them.
        dirty, clearing = Signal(init=1), Signal()
        row = Signal.like(drain.o_row)
        with m.If(self.i_start):
            m.d.sync += [
                clearing.eq(self.i_launch & dirty),
                self.o_launch.eq(self.i_launch & ~dirty),
                row.eq(0),
            ]
        with m.Else():
            m.d.sync += self.o_launch.eq(clearing & row.all())
            with m.If(clearing):
                m.d.sync += [row.eq(row + 1), clearing.eq(~row.all())]
        with m.If(self.o_launch):
            m.d.sync += dirty.eq(1)
        with m.Elif(self.o_done):
            m.d.sync += dirty.eq(0)

        m.submodules.split = ResetInserter(self.i_start)(split)
        wiring.connect(m, wiring.flipped(self.i), split.i)
        wiring.connect(m, split.o, scatter.i)
        wiring.connect(m, drain.o, wiring.flipped(self.o))
        for k, buffer in enumerate(self._buffers):
            m.submodules[f"buffer{k}"] = buffer
            m.d.comb += [
                buffer.i_read.eq(clearing | drain.o_read[k]),
                buffer.i_row.eq(Mux(clearing, row, drain.o_row)),
                drain.i_row[k].eq(buffer.o_row),
            ]
            for write, port in zip(scatter.write, buffer.write, strict=True):
                for name in port.signature.members:
                    mine = getattr(write, name)
                    if name.endswith("_en"):
                        mine = mine & (scatter.o_buffer == k)
                    m.d.comb += getattr(port, name).eq(mine)
        m.d.comb += [
            scatter.i_full.eq(drain.o_full),
            drain.i_hand.eq(scatter.o_hand),
            drain.i_buffer.eq(scatter.o_buffer),
            self.o_done.eq(scatter.o_finished & drain.o_empty),
            self.o_cause.eq(scatter.o_cause),
            self.o_position.eq(scatter.o_position),
            self.o_duplicates.eq(scatter.o_pairs - drain.o_present),
        ]
        return m


class Decompressor(wiring.Component):
    """Converts Top-K pairs in one of two forms, or a user's records, to a dense gradient stream.

    Indices are u32, relative to the first element. `fused` pairs are sorted by index and merged
    into the stream without memory; `scatter` pairs are grouped by chunk, in any order within a
    chunk, and pass through two chunk buffers. Of pairs with equal indices the last one counts; the
    others are duplicates. The elements before the dense beat (fused) or the chunk (scatter) of the
    last good pair are output even if the run ends early: then `o_cause` is the cause, and
    `o_position` the number of pairs before the first that is missing or wrong. A *dry* run checks
    all indices, and neither reads nor outputs values. With a user's decompressor the indices are
    the words of records, the user's unit makes the dense beats, and words that `user.wrong` marks
    are out of range. No pair is a duplicate.

    *Timing*: fused: one dense beat a cycle unless pairs are late or the sink stalls, and a cycle
    more for each beat of pairs that ends within a dense beat. Scatter: see `ChunkScatter`. Dry: one
    beat of indices a cycle.

    *Numerics*: FP16 and BF16 values are widened to FP32 exactly; a NaN becomes the default NaN.
    FP32 values are unchanged.

    Parameters
    ----------
    forms : of `fused` and `scatter`, at least one; ignored with a `user`.
    lanes : elements of a dense beat, a power of two.
    pairs : pairs of a beat, even.
    chunk : elements of a chunk, a power of two, at least two beats. For `scatter` only.
    cut : registers in long paths: two cycles more of latency, and fused, two cycles for each dense
        beat.
    user : a user's decompressor; None takes pairs.

    Members
    -------
    i_index, i_value : In(stream of `WordsLayout`), see `PairReader`.
    o : Out(stream), lane k in bits 32 k to 32 k + 31.
    i_start : begins a run in any state; drops the beats in flight.
    i_pairs, i_count : pairs, and elements; stable during a run.
    i_format : a `ValueFormat`; stable during a run.
    i_dry : the run is dry; stable during a run.
    i_scatter : the form; stable during a run. If there are two.
    o_done : every beat is taken; in a dry run, no index is wrong.
    o_cause : a `PairCause`.
    o_position : see above.
    o_duplicates : pairs overridden by a later pair; valid with `o_done`, except in a dry run.

    Ref: Smart-Infinity, V-B; `fused` omits the paper's buffer.
    """

    def __init__(
        self,
        *,
        forms: Sequence[str] = (FUSED,),
        lanes: int = 16,
        pairs: int = 16,
        chunk: int = 4096,
        cut: bool = False,
        user: UserDecompressor | None = None,
    ) -> None:
        self.cut = cut
        self.forms = tuple(forms) if user is None else ()
        if user is None and (not self.forms or set(self.forms) - {FUSED, SCATTER}):
            raise ValueError(f"Forms must be of {FUSED} and {SCATTER}, not {forms!r}")
        exact_log2(lanes)
        self.lanes = lanes
        self.pairs = pairs
        self.chunk = chunk
        self._reader = PairReader(pairs=pairs)
        both = len(self.forms) > 1
        group = chunk if SCATTER in self.forms else 1
        self._check: PairCheck | RecordCheck
        self._user: UserStage | None = None
        if user is None:
            self._check = PairCheck(pairs=pairs, group=group, choice=both)
        else:
            self._check = RecordCheck(pairs=pairs, wrong=user.wrong)
            unit = user.unit(lanes=lanes, records=pairs)
            self._user = UserStage(unit, lanes=lanes, pairs=pairs)
        self._merge = PairMerge(lanes=lanes, pairs=pairs, cut=cut) if FUSED in self.forms else None
        self._scatter = (
            ChunkScatter(lanes=lanes, pairs=pairs, chunk=chunk) if SCATTER in self.forms else None
        )
        words = stream.Signature(WordsLayout(pairs))
        super().__init__(
            {
                "i_index": In(words),
                "i_value": In(words),
                "o": Out(stream.Signature(data.ArrayLayout(FP32.width, lanes))),
                "i_start": In(1),
                "i_pairs": In(COUNT_WIDTH),
                "i_count": In(COUNT_WIDTH),
                "i_format": In(range(len(ValueFormat))),
                "i_dry": In(1),
                **({"i_scatter": In(1)} if both else {}),
                "o_done": Out(1),
                "o_cause": Out(CAUSE_WIDTH),
                "o_position": Out(COUNT_WIDTH),
                "o_duplicates": Out(COUNT_WIDTH),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        reader, check, merge, scatter = self._reader, self._check, self._merge, self._scatter
        started = Signal()  # `i_start` was in the cycle before
        launch = Signal()  # the reader begins
        m.d.sync += started.eq(self.i_start)
        m.submodules.reader = ResetInserter(self.i_start)(reader)
        m.submodules.check = ResetInserter(self.i_start)(check)
        for source, sink in ((self.i_index, reader.i_index), (self.i_value, reader.i_value)):
            m.d.comb += [
                sink.payload.eq(source.payload),
                # An aborted run consumes no beats of the next.
                sink.valid.eq(source.valid & ~self.i_start),
                source.ready.eq(sink.ready & ~self.i_start),
            ]
        checked = check.o
        if not self.cut:
            wiring.connect(m, reader.o, check.i)
        else:
            early = StreamSlice(PairLayout(self.pairs))
            m.submodules.early = ResetInserter(self.i_start)(early)
            wiring.connect(m, reader.o, early.i)
            wiring.connect(m, early.o, check.i)
            cut = StreamSlice(PairLayout(self.pairs))
            m.submodules.cut = ResetInserter(self.i_start)(cut)
            wiring.connect(m, check.o, cut.i)
            checked = cut.o
        m.d.comb += [
            launch.eq(started),
            reader.i_launch.eq(launch),
            reader.i_pairs.eq(self.i_pairs),
            reader.i_format.eq(self.i_format),
            reader.i_dry.eq(self.i_dry),
            check.i_count.eq(self.i_count),
        ]
        with m.If(self.i_dry):
            self._drop(m, checked)
        if merge is not None:
            m.submodules.merge = ResetInserter(self.i_start)(merge)
            m.d.comb += [
                merge.i_launch.eq(started),
                merge.i_count.eq(self.i_count),
                merge.i.payload.eq(checked.payload),
                merge.o.ready.eq(self.o.ready),
            ]
            with m.If(self._takes(FUSED)):
                m.d.comb += [
                    merge.i.valid.eq(checked.valid),
                    checked.ready.eq(merge.i.ready),
                    self.o_duplicates.eq(check.o_repeats),
                ]
                self._give(m, merge)
        if self._user is not None:
            m.submodules.user = user = ResetInserter(self.i_start)(self._user)
            m.d.comb += [
                user.i_launch.eq(started),
                user.i_count.eq(self.i_count),
                user.i.payload.eq(checked.payload),
                user.o.ready.eq(self.o.ready),
            ]
            with m.If(~self.i_dry):
                m.d.comb += [user.i.valid.eq(checked.valid), checked.ready.eq(user.i.ready)]
                self._give(m, user)
        if scatter is not None:
            m.submodules.scatter = scatter
            m.d.comb += [
                scatter.i_start.eq(self.i_start),
                scatter.i_launch.eq(self._takes(SCATTER)),
                scatter.i_count.eq(self.i_count),
                scatter.i.payload.eq(checked.payload),
                scatter.o.ready.eq(self.o.ready),
            ]
            with m.If(self._takes(SCATTER)):
                m.d.comb += [
                    launch.eq(scatter.o_launch),
                    scatter.i.valid.eq(checked.valid),
                    checked.ready.eq(scatter.i.ready),
                    self.o_duplicates.eq(scatter.o_duplicates),
                ]
                self._give(m, scatter)
        if self.choice:
            m.d.comb += check.i_sorted.eq(~self.i_scatter)
        return m

    @property
    def choice(self) -> bool:
        """Whether the unit has two forms."""
        return len(self.forms) > 1

    def _takes(self, form: str) -> Value:
        """Return whether the run has this form and is not dry."""
        mine: Value | bool = True
        if self.choice:
            mine = self.i_scatter if form == SCATTER else ~self.i_scatter
        return ~self.i_dry & mine

    def _give(self, m: Module, part: PairMerge | ChunkScatter | UserStage) -> None:
        m.d.comb += [
            self.o.valid.eq(part.o.valid),
            self.o.payload.eq(part.o.payload),
            self.o_done.eq(part.o_done),
            self.o_cause.eq(part.o_cause),
            self.o_position.eq(part.o_position),
        ]

    def _drop(self, m: Module, checked: object) -> None:
        """Consume pairs without output; hold the outcome."""
        done = Signal(name="dry_done")
        cause = Signal(CAUSE_WIDTH, name="dry_cause")
        position = Signal(COUNT_WIDTH, name="dry_position")
        last = checked.payload
        m.d.comb += [
            checked.ready.eq(1),
            self.o_done.eq(done),
            self.o_cause.eq(cause),
            self.o_position.eq(position),
        ]
        with m.If(checked.valid & last.end):
            m.d.sync += [
                done.eq(last.cause == PairCause.NONE),
                cause.eq(last.cause),
                position.eq(last.position),
            ]
        with m.If(self.i_start):
            m.d.sync += [done.eq(0), cause.eq(PairCause.NONE)]
