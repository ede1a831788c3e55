"""Top-K decompression through on-chip memory: pairs in any order inside a chunk."""

from amaranth import Array, Cat, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import exact_log2

from nearstep_hw.fp.format import FP32
from nearstep_hw.smartssd.bank_grant import BankGrant
from nearstep_hw.smartssd.chunk_buffer import BankWrites, ChunkBuffer
from nearstep_hw.smartssd.compression import PairCause, ValueFormat
from nearstep_hw.smartssd.pair_check import PairCheck
from nearstep_hw.smartssd.pairs import (
    CAUSE_WIDTH,
    COUNT_WIDTH,
    PairLayout,
    PairReader,
    WordsLayout,
)

__all__ = ["ChunkDrain", "PairScatter", "ScatterDecompressor"]


class PairScatter(wiring.Component):
    """Distributes pairs to the banks of two chunk buffers, filled in turn.

    A chunk is handed on when a pair of a later one is known, or that there is none; chunks without
    pairs are handed on as well. After a beat with a cause nothing more is handed on.

    *Timing.* A beat takes as many cycles as half the pairs that hit its fullest bank, rounded up.
    Writes come a cycle later, from registers.

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
    i_full : of each buffer: it is not to be written.
    write : Out, `BankWrites` of each bank, for the buffer `o_buffer`.
    o_hand : the buffer `o_buffer` is complete with this cycle's writes.
    o_finished : the last chunk has been handed on.
    o_pairs : pairs distributed.
    o_cause, o_position : of the run that ended early.
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
        number = Signal(COUNT_WIDTH - high + 1)  # of the chunk that is filled
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

        for bank, write in enumerate(self.write):
            for port, chosen in (("a", grant.o_first[bank]), ("b", grant.o_second[bank])):
                row, value = 0, 0
                for k in range(pairs):
                    index = held.index[k][low:high]
                    row = row | (index & chosen[k].replicate(high - low))
                    value = value | (held.value[k] & chosen[k].replicate(FP32.width))
                m.d.sync += [
                    getattr(write, f"{port}_en").eq(chosen.any()),
                    getattr(write, f"{port}_row").eq(row),
                    getattr(write, f"{port}_value").eq(value),
                ]
        return m


class ChunkDrain(wiring.Component):
    """Reads chunk buffers in turn, row after row, into a stream of dense beats.

    *Timing.* One row a cycle, without a gap between chunks.

    Parameters
    ----------
    lanes, rows : of a buffer, powers of two.

    Members
    -------
    i_launch : begins a run, out of reset.
    i_count : elements; stable during a run.
    i_hand, i_buffer : this buffer is complete.
    o_full : of each buffer: it holds what has not been taken yet.
    o_read, o_row : of each buffer, see `ChunkBuffer`.
    i_row : of each buffer, what it has read.
    o : Out(stream), lane k in bits 32 k to 32 k + 31.
    o_empty : every beat is taken and `o_present` is final.
    o_present : elements that had been written.
    """

    def __init__(self, *, lanes: int, rows: int) -> None:
        self.lanes = lanes
        self.rows = rows
        self._buffer = ChunkBuffer(banks=lanes, rows=rows)
        ports = self._buffer.signature.members
        super().__init__(
            {
                "i_launch": In(1),
                "i_count": In(COUNT_WIDTH),
                "i_hand": In(1),
                "i_buffer": In(1),
                "o_full": Out(2),
                "o_read": Out(2),
                "o_row": Out(ports["i_row"].shape),
                "i_row": In(ports["o_row"].shape).array(2),
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


class ScatterDecompressor(wiring.Component):
    """Top-K pairs to a dense gradient stream, through two chunk buffers.

    Indices are u32, relative to the first element; those of chunk n come before those of chunk
    n + 1, in any order inside a chunk. Of equal indices the last wins; all but one are counted. The
    chunks before that of the last good pair are given even if the run ends early: then `o_cause`
    says why, and `o_position` how many pairs came before the first that is missing or wrong.

    *Timing.* While one chunk is filled, the one before goes out at one dense beat a cycle. Filling
    takes 1 cycle for a beat of pairs if no bank is hit more than twice, see `PairScatter`. After a
    run that did not end well, or after `rst`, the next one begins `chunk / lanes` cycles later,
    in which both buffers are cleared.

    *Numerics.* As `FusedDecompressor`.

    Parameters
    ----------
    lanes : elements of a dense beat, and banks: a power of two.
    pairs : pairs of a beat, even.
    chunk : elements of a chunk, a power of two, at least two rows.

    Members
    -------
    As those of `FusedDecompressor`.

    Ref: Smart-Infinity, V-B.
    """

    def __init__(self, *, lanes: int = 16, pairs: int = 8, chunk: int = 4096) -> None:
        self.lanes = lanes
        self.pairs = pairs
        self.chunk = chunk
        if exact_log2(chunk) <= exact_log2(lanes):
            raise ValueError(f"A chunk must have at least {2 * lanes} elements, not {chunk!r}")
        rows = chunk // lanes
        self._reader = PairReader(pairs=pairs)
        self._check = PairCheck(pairs=pairs, group=chunk)
        self._scatter = PairScatter(lanes=lanes, pairs=pairs, chunk=chunk)
        self._drain = ChunkDrain(lanes=lanes, rows=rows)
        self._buffers = [ChunkBuffer(banks=lanes, rows=rows) for _ in range(2)]
        words = stream.Signature(WordsLayout(pairs))
        super().__init__(
            {
                "i_index": In(words),
                "i_value": In(words),
                "o": Out(self._drain.o.signature),
                "i_start": In(1),
                "i_pairs": In(COUNT_WIDTH),
                "i_count": In(COUNT_WIDTH),
                "i_format": In(range(len(ValueFormat))),
                "o_done": Out(1),
                "o_cause": Out(CAUSE_WIDTH),
                "o_position": Out(COUNT_WIDTH),
                "o_duplicates": Out(COUNT_WIDTH),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        reader, check, scatter, drain = self._reader, self._check, self._scatter, self._drain
        parts = {"reader": reader, "check": check, "scatter": scatter, "drain": drain}
        for name, part in parts.items():
            m.submodules[name] = ResetInserter(self.i_start)(part)
        # What was reset in mid-run may have left something in the buffers; `rst` clears them not.
        dirty, clearing, launch = Signal(init=1), Signal(), Signal()
        row = Signal.like(drain.o_row)
        with m.If(self.i_start):
            m.d.sync += [clearing.eq(dirty), launch.eq(~dirty), row.eq(0)]
        with m.Else():
            m.d.sync += launch.eq(clearing & row.all())
            with m.If(clearing):
                m.d.sync += [row.eq(row + 1), clearing.eq(~row.all())]
        with m.If(launch):
            m.d.sync += dirty.eq(1)
        with m.Elif(self.o_done):
            m.d.sync += dirty.eq(0)

        for source, sink in ((self.i_index, reader.i_index), (self.i_value, reader.i_value)):
            m.d.comb += [
                sink.payload.eq(source.payload),
                # A run that is given up takes nothing of the next.
                sink.valid.eq(source.valid & ~self.i_start),
                source.ready.eq(sink.ready & ~self.i_start),
            ]
        wiring.connect(m, reader.o, check.i)
        wiring.connect(m, check.o, scatter.i)
        wiring.connect(m, drain.o, wiring.flipped(self.o))
        for part in (reader, scatter, drain):
            m.d.comb += part.i_launch.eq(launch)
        for part in (check, scatter, drain):
            m.d.comb += part.i_count.eq(self.i_count)
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
            reader.i_pairs.eq(self.i_pairs),
            reader.i_format.eq(self.i_format),
            scatter.i_full.eq(drain.o_full),
            drain.i_hand.eq(scatter.o_hand),
            drain.i_buffer.eq(scatter.o_buffer),
            self.o_done.eq(scatter.o_finished & drain.o_empty),
            self.o_cause.eq(scatter.o_cause),
            self.o_position.eq(scatter.o_position),
            self.o_duplicates.eq(scatter.o_pairs - drain.o_present),
        ]
        return m
