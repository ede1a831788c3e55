"""Progress of a run: elements written in full."""

from amaranth import Array, Cat, Const, Elaboratable, Module, ResetInserter, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out


class CommitCounter(wiring.Component):
    """Counts the elements of which every stream has written its block.

    *Timing*: `o_committed` follows the last acknowledgement of a block by two cycles.

    Parameters
    ----------
    streams : written streams.
    block_elements : elements of a block.
    count_width : bits of a count of elements.
    blocks_ahead : blocks by which one stream can be ahead of another.
    optional : streams can be left out.
    cut : a register behind the comparisons: a block every two cycles, and a cycle of latency more.

    Members
    -------
    i_count : elements of the run; the last block may be partial.
    i_use : a bit for each stream that the run has; with none set nothing is counted. If `optional`.
    i_block_done : a bit for each stream: its next block is written.
    o_committed : elements.
    o_whole : all elements are committed, and there is at least one.
    o_waits : a written block is not in `o_committed` yet. If `cut`.
    i_clear : resets the count.
    """

    def __init__(
        self,
        *,
        streams: int,
        block_elements: int,
        count_width: int,
        blocks_ahead: int,
        optional: bool = False,
        cut: bool = False,
    ) -> None:
        self.cut = cut
        self.streams = streams
        self.block_elements = block_elements
        self.blocks_ahead = blocks_ahead
        self.optional = optional
        super().__init__(
            {
                "i_count": In(count_width),
                "i_block_done": In(streams),
                **({"i_use": In(streams)} if optional else {}),
                "o_committed": Out(count_width),
                "o_whole": Out(1),
                **({"o_waits": Out(1)} if cut else {}),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        ahead = Array(
            Signal(range(self.blocks_ahead + 1), name=f"ahead{i}") for i in range(self.streams)
        )
        advance = Signal()
        left = Signal.like(self.i_count)
        last = Signal()
        settled = Signal()  # `last` is valid for `o_committed`
        to = m.d.sync if self.cut else m.d.comb

        use = self.i_use if self.optional else Const((1 << self.streams) - 1, self.streams)
        written = (Cat(blocks != 0 for blocks in ahead) | ~use).all() & use.any()
        m.d.comb += [
            advance.eq(written & settled),
            left.eq(self.i_count - self.o_committed),
        ]
        to += [
            last.eq(left <= self.block_elements),
            self.o_whole.eq((left == 0) & (self.i_count != 0)),
            settled.eq(~advance if self.cut else 1),
        ]
        if self.cut:
            m.d.comb += self.o_waits.eq(written)
        for blocks, done, used in zip(ahead, self.i_block_done, use, strict=True):
            m.d.sync += blocks.eq(blocks + done - (advance & used))
        with m.If(advance):
            with m.If(last):
                m.d.sync += self.o_committed.eq(self.i_count)
            with m.Else():
                m.d.sync += self.o_committed.eq(self.o_committed + self.block_elements)
        return ResetInserter(self.i_clear)(m)
