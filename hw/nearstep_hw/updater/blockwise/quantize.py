"""Conversion of results to states in 8 bits."""

from amaranth import Array, Cat, Const, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.hdl import Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.fp.div import div
from nearstep_hw.fp.pipeline import Pipeline
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_hw.stream.gearbox import PieceLayout, StreamSplit
from nearstep_hw.updater.blockwise import nearest
from nearstep_hw.updater.blockwise.group_scale import GroupScale
from nearstep_hw.updater.blockwise.shape import CODE_WIDTH, BlockwiseShape
from nearstep_spec.fp import FP32

GROUPS_AHEAD = 2
"""Groups of elements buffered until they are divided by their scale."""

SCALES_AHEAD = 2 * GROUPS_AHEAD
"""Scales buffered: of whole groups, and of a group cut short by the end of the run."""

BLOCKS_AHEAD = 2
"""Blocks of codes buffered until their scales are written."""


class Quantize(wiring.Component):
    """Converts beats of binary32 to blocks of scales and codes, see `nearstep_spec.blockwise`.

    A group of elements waits for its largest magnitude and is divided by it; the codes of a
    block wait until its scales, which precede them, are known. The last block of a run has as
    many codes as there are elements; the rest of their beat is undefined.

    *Timing*: `ways` elements a cycle. A beat is delayed by the rest of its block and `latency`
    cycles.

    *Numerics*: the quotient is rounded once, then quantized to the nearest entry.

    Parameters
    ----------
    beats_width : bits of `i_beats`.

    Members
    -------
    i : beats of binary32.
    o : beats as in memory.
    i_beats : beats of the run; held until the last beat is output.
    i_tail : a bit for each element of the last beat: the element exists; held as `i_beats`.
    i_clear : clears all state.

    Attributes
    ----------
    latency : cycles from an element with its scale to its code.
    """

    def __init__(self, shape: BlockwiseShape, *, beats_width: int) -> None:
        self.shape = shape
        self.latency = shape.fpga.depths["div"] + nearest.DEPTH
        beat = stream.Signature(shape.width)
        super().__init__(
            {
                "i": In(beat),
                "o": Out(beat),
                "i_beats": In(beats_width),
                "i_tail": In(shape.lanes),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        shape = self.shape
        piece_width = FP32.width * shape.ways
        m.submodules.split = split = StreamSplit(piece_width=piece_width, factor=shape.parts)
        m.submodules.group = group = StreamFifo(
            PieceLayout(piece_width), depth=GROUPS_AHEAD * shape.group_parts
        )
        m.submodules.scale = scale = GroupScale(ways=shape.ways)
        m.submodules.scales = scales = StreamFifo(FP32.width, depth=SCALES_AHEAD)
        m.submodules.headers = headers = StreamFifo(shape.width, depth=BLOCKS_AHEAD)
        m.submodules.codes = codes = StreamFifo(shape.width, depth=BLOCKS_AHEAD * shape.code_beats)

        self._take(m, split)
        taken = Signal()
        m.d.comb += [
            taken.eq(group.i.valid & group.i.ready),
            group.i.payload.eq(split.o.payload),
            group.i.valid.eq(split.o.valid),
            split.o.ready.eq(group.i.ready),
            scale.i_valid.eq(taken),
            scale.i_numbers.eq(split.o.payload.data),
            scale.i_last.eq(split.o.payload.last),
            scales.i.payload.eq(scale.o_scale),
            scales.i.valid.eq(scale.o_valid),  # never full: see SCALES_AHEAD
        ]
        pipe, takes = self._begin(m, group, scales, headers)
        self._gather(m, pipe, takes, group.o.payload, scales.o.payload, codes)
        self._give(m, headers, codes)
        return ResetInserter(self.i_clear)(m)

    def _take(self, m: Module, split: StreamSplit) -> None:
        """Split beats; absent elements are 0 and do not affect a scale."""
        number = Signal.like(self.i_beats)
        last = Signal()
        m.d.comb += [
            last.eq(number == self.i_beats - 1),
            split.i.valid.eq(self.i.valid),
            split.i.payload.last.eq(last),
            self.i.ready.eq(split.i.ready),
        ]
        for lane, there in enumerate(self.i_tail):
            word = self.i.payload.word_select(lane, FP32.width)
            m.d.comb += split.i.payload.data.word_select(lane, FP32.width).eq(
                Mux(there | ~last, word, 0)
            )
        with m.If(self.i.valid & self.i.ready):
            m.d.sync += number.eq(number + 1)

    def _begin(
        self, m: Module, group: StreamFifo, scales: StreamFifo, headers: StreamFifo
    ) -> tuple[Pipeline, Signal]:
        """Accept elements whose scale is known and output the scales of each finished block; return
        the pipeline, and whether elements enter it.
        """
        shape = self.shape
        advance, takes, group_ends, block_ends = Signal(), Signal(), Signal(), Signal()
        part = Signal(range(shape.block_parts))
        now = part[exact_log2(shape.group_parts) :]
        earlier = Array(Signal(FP32.width, name=f"scale{k}") for k in range(1 << len(now)))
        scale, last = scales.o.payload, group.o.payload.last
        m.d.comb += [
            group_ends.eq((part % shape.group_parts == shape.group_parts - 1) | last),
            block_ends.eq((part == shape.block_parts - 1) | last),
            takes.eq(advance & group.o.valid & scales.o.valid & (headers.i.ready | ~block_ends)),
            group.o.ready.eq(takes),
            scales.o.ready.eq(takes & group_ends),
            headers.i.valid.eq(takes & block_ends),
        ]
        for k, kept in enumerate(earlier):
            word = headers.i.payload.word_select(k, FP32.width)
            m.d.comb += word.eq(Mux(now == k, scale, kept))
        with m.If(takes):
            m.d.sync += part.eq(Mux(block_ends, 0, part + 1))
            with m.If(group_ends):
                m.d.sync += earlier[now].eq(scale)
            with m.If(block_ends):
                m.d.sync += [kept.eq(0) for kept in earlier]
        return Pipeline(m, en=advance, delay=shape.fpga.delay), takes

    def _gather(
        self,
        m: Module,
        pipe: Pipeline,
        takes: Signal,
        piece: data.View,
        scale: Value,
        codes: StreamFifo,
    ) -> None:
        """Divide elements by their scale, and gather the codes into beats."""
        found, whole = Signal(), Signal()
        place = Signal(range(self.shape.code_parts))
        beat = Signal(self.shape.width, reset_less=True)
        last = pipe.at(pipe.wrap(piece.last, 0, "last"), self.latency)
        made = self._quantized(pipe, piece.data, scale)
        m.d.comb += [
            pipe.en.eq(~codes.i.valid | codes.i.ready),
            found.eq(pipe.valid(takes, self.latency)),
            whole.eq((place == self.shape.code_parts - 1) | last),
            codes.i.payload.eq(beat),
        ]
        with m.If(pipe.en):
            m.d.sync += codes.i.valid.eq(found & whole)
            with m.If(found):
                m.d.sync += place.eq(Mux(whole, 0, place + 1))
                for k in range(self.shape.code_parts):
                    with m.If(place == k):
                        m.d.sync += beat.word_select(k, len(made)).eq(made)

    def _quantized(self, pipe: Pipeline, numbers: Value, scale: Value) -> Value:
        """Return the codes of a part, at the end of the pipeline."""
        divisor = pipe.wrap(scale, 0, "divisor")
        found = []
        for way in range(self.shape.ways):
            number = pipe.wrap(numbers.word_select(way, FP32.width), 0, f"number{way}")
            quotient = div(
                pipe, FP32, number, divisor, depth=self.shape.fpga.depths["div"], flags=False
            ).z
            code = nearest.nearest(pipe, quotient, signed=self.shape.signed)
            found.append(pipe.at(code, self.latency))
            assert len(found[-1]) == CODE_WIDTH
        return Cat(found)

    def _give(self, m: Module, headers: StreamFifo, codes: StreamFifo) -> None:
        """Output the scales of each block, then its codes."""
        beats = self.shape.code_beats
        left = Signal(range(beats + 1))  # beats of codes left in the block
        m.d.comb += [
            self.o.payload.eq(Mux(left == 0, headers.o.payload, codes.o.payload)),
            self.o.valid.eq(Mux(left == 0, headers.o.valid, codes.o.valid)),
            headers.o.ready.eq((left == 0) & self.o.ready),
            codes.o.ready.eq((left != 0) & self.o.ready),
        ]
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += left.eq(Mux(left == 0, Const(beats), left - 1))
