"""Results on their way to memory as states in 8 bits."""

from amaranth import Array, Cat, Const, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.hdl import Value
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.fp.div import div
from nearstep_hw.fp.pipeline import Pipeline
from nearstep_hw.rule.technology import TECHNOLOGIES
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_hw.stream.gearbox import PieceLayout, StreamSplit
from nearstep_hw.updater.blockwise import nearest
from nearstep_hw.updater.blockwise.dequantize import CODE_WIDTH, CODES_OF_A_WORD
from nearstep_hw.updater.blockwise.group_scale import GroupScale
from nearstep_spec.blockwise import GROUP
from nearstep_spec.fp import FP32
from nearstep_spec.technology import TECHNOLOGIES as NAMES

SCALES_AHEAD = 4
"""Scales that wait for their elements: of two groups in full, and of one that the run ends in."""

BLOCKS_AHEAD = 2
"""Blocks of codes that wait for what is before them in memory."""


class Quantize(wiring.Component):
    """Makes blocks of scales and codes of beats of binary32, see `nearstep_spec.blockwise`.

    A group of elements waits for its largest magnitude, and is divided by it; the codes of a block
    wait until its scales, which come first, are known. The last block of a run goes out with as
    many codes as there are elements; what is behind them in their beat is anything.

    *Timing*: `ways` elements a cycle. A beat waits for the rest of its block, and `latency` cycles.

    *Numerics*: the quotient is rounded once, then has the code of the entry next to it.

    Parameters
    ----------
    lanes : binary32 elements of a beat.
    ways : elements a cycle, a divisor of `lanes`.
    block_elements : of a block: `GROUP` to `GROUP * lanes`, a power of two.
    signed : which map.
    beats_width : bits of `i_beats`.
    technology : FPGA that the dividers are divided into stages for.

    Members
    -------
    i : beats of binary32.
    o : beats as they lie in memory.
    i_beats : beats of the run; held while anything is inside.
    i_tail : a bit for each element of its last beat: it is there; held likewise.
    i_clear : forgets everything.

    Attributes
    ----------
    latency : from an element with its scale to its code.
    """

    def __init__(
        self,
        *,
        lanes: int,
        ways: int,
        block_elements: int,
        signed: bool,
        beats_width: int,
        technology: str = NAMES[0],
    ) -> None:
        self.lanes = lanes
        self.ways = ways
        self.block_elements = block_elements
        self.signed = signed
        self.technology = TECHNOLOGIES[technology]
        self.latency = self.technology.depths["div"] + nearest.DEPTH
        self.width = FP32.width * lanes
        super().__init__(
            {
                "i": In(stream.Signature(self.width)),
                "o": Out(stream.Signature(self.width)),
                "i_beats": In(beats_width),
                "i_tail": In(lanes),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        piece_width = FP32.width * self.ways
        m.submodules.split = split = StreamSplit(
            piece_width=piece_width, factor=self.lanes // self.ways
        )
        m.submodules.group = group = StreamFifo(
            PieceLayout(piece_width), depth=2 * GROUP // self.ways
        )
        m.submodules.scale = scale = GroupScale(ways=self.ways)
        m.submodules.scales = scales = StreamFifo(FP32.width, depth=SCALES_AHEAD)
        m.submodules.headers = headers = StreamFifo(self.width, depth=BLOCKS_AHEAD)
        beats = self.block_elements // (CODES_OF_A_WORD * self.lanes)  # of codes, in a block
        m.submodules.codes = codes = StreamFifo(self.width, depth=BLOCKS_AHEAD * beats)

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
            scales.i.valid.eq(scale.o_valid),  # there is room: see SCALES_AHEAD
        ]
        self._divide(m, group, scales, headers, codes)
        self._give(m, headers, codes, beats)
        return ResetInserter(self.i_clear)(m)

    def _take(self, m: Module, split: StreamSplit) -> None:
        """Take beats apart; elements that are not there are 0, and have no part in a scale."""
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

    def _divide(
        self,
        m: Module,
        group: StreamFifo,
        scales: StreamFifo,
        headers: StreamFifo,
        codes: StreamFifo,
    ) -> None:
        """Divide elements by their scales, and gather scales and codes."""
        parts = GROUP // self.ways
        places = CODES_OF_A_WORD * self.lanes // self.ways  # parts of a beat of codes
        advance, takes, group_ends, block_ends = Signal(), Signal(), Signal(), Signal()
        part = Signal(range(self.block_elements // self.ways))
        earlier = Array(
            Signal(FP32.width, name=f"scale{k}") for k in range(self.block_elements // GROUP)
        )
        header = Signal(self.width)
        now = part[exact_log2(parts) :]
        pipe = Pipeline(m, en=advance, delay=self.technology.delay)

        numbers = group.o.payload
        m.d.comb += [
            group_ends.eq((part % parts == parts - 1) | numbers.last),
            block_ends.eq((part == self.block_elements // self.ways - 1) | numbers.last),
            takes.eq(advance & group.o.valid & scales.o.valid & (headers.i.ready | ~block_ends)),
            group.o.ready.eq(takes),
            scales.o.ready.eq(takes & group_ends),
            headers.i.valid.eq(takes & block_ends),
            headers.i.payload.eq(header),
        ]
        for k, kept in enumerate(earlier):
            word = header.word_select(k, FP32.width)
            m.d.comb += word.eq(Mux(now == k, scales.o.payload, kept))
        with m.If(takes):
            m.d.sync += part.eq(Mux(block_ends, 0, part + 1))
            with m.If(group_ends):
                m.d.sync += earlier[now].eq(scales.o.payload)
            with m.If(block_ends):
                m.d.sync += [kept.eq(0) for kept in earlier]

        found = pipe.valid(takes, self.latency)
        last = pipe.at(pipe.wrap(numbers.last, 0, "last"), self.latency)
        made = self._coded(pipe, numbers.data, scales.o.payload)
        place = Signal(range(places))
        whole = Signal()
        beat = Signal(self.width, reset_less=True)
        m.d.comb += [
            advance.eq(~codes.i.valid | codes.i.ready),
            codes.i.payload.eq(beat),
        ]
        with m.If(advance):
            m.d.sync += codes.i.valid.eq(found & whole)
            with m.If(found):
                m.d.sync += place.eq(Mux(whole, 0, place + 1))
                for k in range(places):
                    with m.If(place == k):
                        m.d.sync += beat.word_select(k, len(made)).eq(made)
        m.d.comb += whole.eq((place == places - 1) | last)

    def _coded(self, pipe: Pipeline, numbers: Value, scale: Value) -> Value:
        """The codes of a part, at the end of the pipeline."""
        divisor = pipe.wrap(scale, 0, "divisor")
        found = []
        for way in range(self.ways):
            number = pipe.wrap(numbers.word_select(way, FP32.width), 0, f"number{way}")
            quotient = div(
                pipe, FP32, number, divisor, depth=self.technology.depths["div"], flags=False
            ).z
            code = nearest.nearest(pipe, quotient, signed=self.signed)
            found.append(pipe.at(code, self.latency))
            assert len(found[-1]) == CODE_WIDTH
        return Cat(found)

    def _give(self, m: Module, headers: StreamFifo, codes: StreamFifo, beats: int) -> None:
        """Give the scales of each block, then its codes."""
        left = Signal(range(beats + 1))  # beats of codes that the block still has
        m.d.comb += [
            self.o.payload.eq(Mux(left == 0, headers.o.payload, codes.o.payload)),
            self.o.valid.eq(Mux(left == 0, headers.o.valid, codes.o.valid)),
            headers.o.ready.eq((left == 0) & self.o.ready),
            codes.o.ready.eq((left != 0) & self.o.ready),
        ]
        with m.If(self.o.valid & self.o.ready):
            m.d.sync += left.eq(Mux(left == 0, Const(beats), left - 1))
