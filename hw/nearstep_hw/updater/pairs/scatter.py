"""Scatter of pairs, in any order inside a chunk, into on-chip memory."""

from amaranth import Array, Cat, Elaboratable, Module, Mux, Signal
from amaranth.hdl import Value
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.updater.pairs.bank_grant import BankGrant
from nearstep_hw.updater.pairs.chunk_buffer import BankWrites, CellLayout
from nearstep_hw.updater.pairs.layout import CAUSE_WIDTH, COUNT_WIDTH, PairLayout
from nearstep_spec.fp import FP32
from nearstep_spec.updater.compression import PairCause

__all__ = ["ChunkDrain", "PairScatter"]


class PairScatter(wiring.Component):
    """Distributes pairs to the banks of two chunk buffers, filled in turn.

    A chunk is complete when a pair of a later chunk, or the end of the pairs, is known; chunks
    without pairs are completed as well. After a beat with a cause no chunk is completed.

    *Timing*: a beat takes as many cycles as half the pairs of its fullest bank, rounded up.
    Writes are registered: a cycle later.

    Parameters
    ----------
    lanes : banks, a power of two.
    pairs : pairs of a beat.
    chunk : elements of a chunk, a power of two.

    Members
    -------
    i : In(stream of `PairLayout`), chunks in order, all in range, see `PairCheck`.
    i_launch : begins a run, out of reset.
    i_count : elements; stable during a run.
    i_full : a bit for each buffer: the buffer must not be written.
    write : Out, `BankWrites` of each bank, for the buffer `o_buffer`.
    o_hand : the buffer `o_buffer` is complete with this cycle's writes.
    o_finished : the last chunk is complete.
    o_pairs : pairs distributed.
    o_cause, o_position : why, and after how many pairs, a run ended early.
    """

    def __init__(self, *, lanes: int, pairs: int, chunk: int) -> None:
        self.lanes = lanes
        self.pairs = pairs
        self.chunk = chunk
        row_width = exact_log2(chunk) - exact_log2(lanes)
        super().__init__(
            {
                "i": In(stream.Signature(PairLayout(pairs))),
                "i_launch": In(1),
                "i_count": In(COUNT_WIDTH),
                "i_full": In(2),
                "write": Out(BankWrites(row_width)).array(lanes),
                "o_buffer": Out(1),
                "o_hand": Out(1),
                "o_finished": Out(1),
                "o_pairs": Out(COUNT_WIDTH),
                "o_cause": Out(CAUSE_WIDTH),
                "o_position": Out(COUNT_WIDTH),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        pairs, low, high = self.pairs, exact_log2(self.lanes), exact_log2(self.chunk)
        m.submodules.grant = grant = BankGrant(requesters=pairs, banks=self.lanes)
        running = Signal()
        held = Signal(PairLayout(pairs))  # `keep` is what is left of it
        number = Signal(COUNT_WIDTH - high + 1)  # of the current chunk
        chunks = Signal(COUNT_WIDTH - high + 1)
        buffer = Signal()
        work, hand, take = Signal(), Signal(), Signal()
        here, later, left = Signal(pairs), Signal(pairs), Signal(pairs)

        for k in range(pairs):
            index = held.index[k]
            m.d.comb += [
                here[k].eq(held.keep[k] & (index[high:] == number)),
                grant.i_want[k].eq(here[k] & work),
                grant.i_bank[k].eq(index[:low]),
            ]
        m.d.comb += [
            work.eq(running & ~self.i_full.bit_select(buffer, 1)),
            later.eq(held.keep & ~here),
            left.eq(grant.o_left | later),
            self.i.ready.eq(take),
        ]
        with m.If(work & ~grant.o_left.any()):
            with m.If(later.any()):
                m.d.comb += hand.eq(1)
            with m.Elif(~held.end):
                m.d.comb += take.eq(1)
            with m.Elif(held.cause != PairCause.NONE):
                m.d.sync += [
                    running.eq(0),
                    self.o_cause.eq(held.cause),
                    self.o_position.eq(held.position),
                ]
            with m.Elif(number == chunks):
                m.d.sync += [running.eq(0), self.o_finished.eq(1)]
            with m.Else():
                m.d.comb += hand.eq(1)
        with m.If(work):
            m.d.sync += held.keep.eq(left)
        with m.If(take & self.i.valid):
            kept = self.i.payload.keep
            m.d.sync += [
                held.eq(self.i.payload),
                self.o_pairs.eq(self.o_pairs + sum(kept[k] for k in range(pairs))),
            ]
        m.d.sync += [self.o_hand.eq(hand), self.o_buffer.eq(buffer)]
        with m.If(hand):
            m.d.sync += [number.eq(number + 1), buffer.eq(~buffer)]
        with m.If(self.i_launch):
            m.d.sync += [running.eq(1), chunks.eq((self.i_count + (self.chunk - 1)) >> high)]

        cells = [Cat(held.index[k][low:high], held.value[k]) for k in range(pairs)]
        for bank, write in enumerate(self.write):
            for port, chosen in (("a", grant.o_first[bank]), ("b", grant.o_second[bank])):
                row, value = getattr(write, f"{port}_row"), getattr(write, f"{port}_value")
                m.d.sync += [
                    getattr(write, f"{port}_en").eq(chosen.any()),
                    Cat(row, value).eq(self._selected(m, chosen, cells, f"{port}{bank}")),
                ]
        return m

    def _selected(self, m: Module, chosen: Value, cells: list[Value], name: str) -> Value:
        """Return the cell selected by the one bit of `chosen`; undefined if no bit is set.

        The number of the bit drives multiplexers: one of four bits is one LUT, a sum of four
        products two.
        """
        number = Signal(range(len(cells)), name=f"number_{name}")
        for each in range(len(number)):
            ones = [chosen[k] for k in range(len(cells)) if k >> each & 1]
            m.d.comb += number[each].eq(Cat(ones).any())
        for bit in number:
            halves = zip(cells[::2], [*cells[1::2], *cells[-1:]], strict=False)
            cells = [Mux(bit, high, low) for low, high in halves]
        return cells[0]


class ChunkDrain(wiring.Component):
    """Reads chunk buffers in turn, row after row, into a stream of dense beats.

    *Timing*: one row a cycle, without a gap between chunks.

    Parameters
    ----------
    lanes, rows : of a buffer, powers of two.

    Members
    -------
    i_launch : begins a run, out of reset.
    i_count : elements; stable during a run.
    i_hand, i_buffer : this buffer is complete.
    o_full : a bit for each buffer: the buffer has beats not taken yet.
    o_read, o_row : of each buffer, see `ChunkBuffer`.
    i_row : row read from each buffer.
    o : Out(stream), lane k in bits 32 k to 32 k + 31.
    o_empty : every beat is taken and `o_present` is final.
    o_present : elements that were written.
    """

    def __init__(self, *, lanes: int, rows: int) -> None:
        self.lanes = lanes
        self.rows = rows
        super().__init__(
            {
                "i_launch": In(1),
                "i_count": In(COUNT_WIDTH),
                "i_hand": In(1),
                "i_buffer": In(1),
                "o_full": Out(2),
                "o_read": Out(2),
                "o_row": Out(range(rows)),
                "i_row": In(data.ArrayLayout(CellLayout(), lanes)).array(2),
                "o": Out(stream.Signature(data.ArrayLayout(FP32.width, lanes))),
                "o_empty": Out(1),
                "o_present": Out(COUNT_WIDTH + 1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        low = exact_log2(self.lanes)
        beats = Signal(COUNT_WIDTH - low + 1)  # left to read
        buffer = Signal()  # in turn to be read
        waiting = Signal()  # buffer of the row at the output
        whole = Signal()  # that row is the last of its buffer
        fetch, last, leaves = Signal(), Signal(), Signal()
        tags, counted = Signal(self.lanes), Signal()
        busy = Signal(2)  # a buffer from its first row read to its last row taken
        row = Array(self.i_row)[waiting]

        m.d.comb += [
            leaves.eq(self.o.valid & self.o.ready),
            fetch.eq((self.o_full & ~busy).bit_select(buffer, 1) & (~self.o.valid | self.o.ready)),
            last.eq((self.o_row == self.rows - 1) | (beats == 1)),
            self.o_read.eq(Mux(fetch, Mux(buffer, 0b10, 0b01), 0)),
        ]
        for lane in range(self.lanes):
            m.d.comb += self.o.payload[lane].eq(row[lane].value)
        with m.If(fetch):
            m.d.sync += [
                self.o.valid.eq(1),
                self.o_row.eq(Mux(last, 0, self.o_row + 1)),
                beats.eq(beats - 1),
                buffer.eq(buffer ^ last),
                waiting.eq(buffer),
                whole.eq(last),
            ]
        with m.Elif(self.o.ready):
            m.d.sync += self.o.valid.eq(0)

        with m.If(leaves & whole):
            m.d.sync += [
                self.o_full.bit_select(waiting, 1).eq(0),
                busy.bit_select(waiting, 1).eq(0),
            ]
        with m.If(fetch & last):
            m.d.sync += busy.bit_select(buffer, 1).eq(1)
        with m.If(self.i_hand):
            m.d.sync += self.o_full.bit_select(self.i_buffer, 1).eq(1)

        m.d.sync += [
            tags.eq(Mux(leaves, Cat(row[lane].present for lane in range(self.lanes)), 0)),
            counted.eq(leaves),
            self.o_present.eq(self.o_present + sum(tags[lane] for lane in range(self.lanes))),
        ]
        m.d.comb += self.o_empty.eq(~self.o.valid & ~counted & (beats == 0))
        with m.If(self.i_launch):
            m.d.sync += beats.eq((self.i_count + (self.lanes - 1)) >> low)
        return m
