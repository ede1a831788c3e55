"""Random bits for the elements of an array, in order."""

from amaranth import Cat, Const, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.fp.pipeline import Pipeline
from nearstep_hw.updater.threefry import DEPTH, threefry
from nearstep_spec.rounding import (
    CALL_ELEMENTS,
    INDEX_BITS,
    RANDOM_BITS,
    SKIP_BITS,
    STREAM_BIT,
    STREAMS,
    WORD_BITS,
)

STREAM_WIDTH = exact_log2(STREAMS)


class RandomBits(wiring.Component):
    """Generates 16 random bits for each element of an array, a beat at a time.

    The bits do not depend on the array's contents and are prefetched, as many as the pipeline
    holds.

    *Timing*: `calls` calls of the generator a cycle, 4 elements each; the first beat some
    `threefry.DEPTH + 2` cycles after `i_clear`.

    Parameters
    ----------
    lanes : elements of a beat.
    calls : generators; a power of two, at most a beat's worth, or 1.
    block_elements : elements of a block.

    Members
    -------
    o : 16 bits an element, the first lowest.
    i_stream : stream number of the array; 0 generates none.
    i_seed, i_step : key of the generator.
    i_index, i_within : index of the first element, and its offset in its block; multiples of
        `nearstep_spec.rounding.alignment`.
    i_skip : extra increment of the index after each block. All inputs hold while `i_clear`
        is low.
    i_clear : restarts.

    Ref: `nearstep_spec.rounding`.
    """

    def __init__(self, *, lanes: int, calls: int, block_elements: int) -> None:
        self.lanes = lanes
        self.calls = calls
        self.block_elements = block_elements
        super().__init__(
            {
                "o": Out(stream.Signature(RANDOM_BITS * lanes)),
                "i_stream": In(STREAM_WIDTH),
                "i_seed": In(WORD_BITS),
                "i_step": In(WORD_BITS),
                "i_index": In(INDEX_BITS),
                "i_within": In(SKIP_BITS),
                "i_skip": In(SKIP_BITS),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        advance, loaded = Signal(), Signal()
        index = Signal(INDEX_BITS)
        made = CALL_ELEMENTS * self.calls  # elements a cycle
        within = Signal(exact_log2(self.block_elements))
        last = Signal()  # of a block
        m.d.comb += last.eq(within == self.block_elements - made)
        with m.If(self.i_stream == 0):
            pass
        with m.Elif(~loaded):
            m.d.sync += [loaded.eq(1), index.eq(self.i_index), within.eq(self.i_within)]
        with m.Elif(advance):
            m.d.sync += [
                index.eq(index + made + Mux(last, self.i_skip, 0)),
                within.eq(within + made),
            ]

        pipe = Pipeline(m, en=advance)
        key = [pipe.constant(self.i_seed), pipe.constant(self.i_step)]
        words = []
        for call in range(self.calls):
            bits = exact_log2(self.calls)
            number = Cat(Const(call, bits), index[exact_log2(made) :])
            counter = Signal(2 * WORD_BITS, name=f"counter{call}")
            m.d.comb += [
                counter.eq(number),
                counter[WORD_BITS + STREAM_BIT :].eq(self.i_stream),
            ]
            halves = [
                pipe.source(counter.word_select(half, WORD_BITS), 0, f"counter{call}_{half}")
                for half in range(2)
            ]
            words += [pipe.at(each, DEPTH) for each in threefry(pipe, halves, key)]
        valid = pipe.valid(loaded, DEPTH)
        self._gather(m, Cat(words), valid, advance)
        return ResetInserter(self.i_clear)(m)

    def _gather(self, m: Module, words: Cat, valid: Signal, advance: Signal) -> None:
        """Form beats of the results of the calls of a cycle."""
        width = len(self.o.payload)
        if len(words) < width:
            parts = width // len(words)
            part = Signal(range(parts))
            beat = Signal(width)
            m.d.comb += [
                advance.eq(self.o.ready | ~self.o.valid),
                self.o.payload.eq(beat),
            ]
            with m.If(advance):
                m.d.sync += self.o.valid.eq(valid & (part == parts - 1))
                with m.If(valid):
                    m.d.sync += [part.eq(part + 1), beat.eq(Cat(beat, words)[len(words) :])]
            return
        turns = len(words) // width
        turn = Signal(range(turns))
        m.d.comb += [
            self.o.valid.eq(valid),
            self.o.payload.eq(words.word_select(turn, width)),
            advance.eq(~valid | (self.o.ready & (turn == turns - 1))),
        ]
        if turns > 1:
            with m.If(valid & self.o.ready):
                m.d.sync += turn.eq(turn + 1)


def calls_of(units: int) -> int:
    """Return the calls a cycle that match the rate of `units` functional units."""
    return max(1, units // CALL_ELEMENTS)
