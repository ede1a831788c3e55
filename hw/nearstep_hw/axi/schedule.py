"""Schedule of bursts: arrays split into blocks, blocks into bursts."""

from collections.abc import Sequence

from amaranth import Array, Cat, Const, Elaboratable, Module, Mux, ResetInserter, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out
from amaranth.utils import bits_for, exact_log2

from nearstep_hw.axi.burst import BurstLayout
from nearstep_hw.axi.signature import MAX_BURST_BEATS, PAGE_BYTES


class BlockSchedule(wiring.Component):
    """Outputs the bursts of arrays of equal length, block by block, round robin over the arrays.

    Block 0 of stream 0, block 0 of stream 1, and so on, then block 1 of stream 0. A burst ends at
    the end of its block and at every multiple of the longest burst, so crosses no page. Blocks of
    arrays with elements of half the width have half the beats; blocks of arrays in 8 bits have a
    quarter of the beats, and a beat of scales before them.

    *Timing*: a burst every two cycles, and one more cycle where a block begins or is omitted.

    Parameters
    ----------
    streams : number of arrays.
    address_width : bits of a byte address.
    beat_bytes, block_beats, burst_beats : powers of two; a burst is at most a page.
    optional : arrays can be omitted.
    narrow : numbers of the arrays that can have elements of half the width.
    quantized : numbers of the arrays in 8 bits, with scales, see `nearstep_spec.blockwise`.
    number_width : bits of a beat's number; None: as many as memory needs. More if arrays of narrow
        elements can have more elements than an array of full width.

    Members
    -------
    i_start : begins; only when `o_idle`.
    i_use : a bit for each array, set if used; held while the schedule runs. If `optional`.
    i_beats : beats of each array, at least 1; held while the schedule runs.
    i_narrow : a bit for each of `narrow`, in order: the array has half of `i_beats`, rounded up;
        held while the schedule runs. If `narrow` is not empty.
    i_base : byte address of each array, a multiple of a beat; held while the schedule runs.
    i_clear : withdraws the offered burst and returns to idle.
    o : the bursts.
    o_idle : no burst is left.

    Ref: AXDIMM paper, section 3.3 (round robin) and 3.4 (block).
    """

    def __init__(
        self,
        *,
        streams: int,
        address_width: int,
        beat_bytes: int,
        block_beats: int,
        burst_beats: int,
        optional: bool = False,
        narrow: Sequence[int] = (),
        quantized: Sequence[int] = (),
        number_width: int | None = None,
    ) -> None:
        if burst_beats > MAX_BURST_BEATS or burst_beats * beat_bytes > PAGE_BYTES:
            raise ValueError(
                f"A burst must be at most {MAX_BURST_BEATS} beats and {PAGE_BYTES} bytes, "
                f"not {burst_beats!r} beats of {beat_bytes!r} bytes"
            )
        self.streams = streams
        self.optional = optional
        self.narrow = tuple(narrow)
        self.quantized = tuple(quantized)
        self.block_beats = block_beats
        self.burst_beats = burst_beats
        self.offset_bits = exact_log2(beat_bytes)
        self.burst_bits = exact_log2(burst_beats)
        self.beat_address_width = address_width - self.offset_bits
        self.number_width = self.beat_address_width if number_width is None else number_width
        layout = BurstLayout(streams=streams, address_width=address_width, burst_beats=burst_beats)
        super().__init__(
            {
                "i_start": In(1),
                "i_beats": In(self.number_width + 1),
                "i_base": In(address_width).array(streams),
                **({"i_use": In(streams)} if optional else {}),
                **({"i_narrow": In(len(self.narrow))} if self.narrow else {}),
                "i_clear": In(1),
                "o": Out(stream.Signature(layout)),
                "o_idle": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        burst = self.o.payload
        bases = Array(base[self.offset_bits :] for base in self.i_base)
        stream_index = Signal(range(self.streams))
        offset = Signal(self.number_width)  # of the block within each array, in beats
        ahead = Signal(self.number_width + 1)  # beats of each array from that block on
        address = Signal(self.beat_address_width)
        left = Signal(range(self.block_beats + 1))  # beats of the block not yet offered
        length = Signal(bits_for(self.burst_beats))
        to_boundary = Signal.like(length)
        last_block = Signal()
        block_ends = Signal()

        m.d.comb += [
            to_boundary.eq(self.burst_beats - address[: self.burst_bits]),
            last_block.eq(ahead <= self.block_beats),
            block_ends.eq(left == length),
            burst.stream.eq(stream_index),
            burst.address.eq(Cat(Const(0, self.offset_bits), address)),
            burst.beats.eq(length),
            burst.block_last.eq(block_ends),
            burst.run_last.eq(block_ends & last_block),
        ]

        def next_block() -> None:
            with m.If(stream_index != self.streams - 1):
                m.d.sync += stream_index.eq(stream_index + 1)
                m.next = "BLOCK"
            with m.Elif(~last_block):
                m.d.sync += [
                    stream_index.eq(0),
                    offset.eq(offset + self.block_beats),
                    ahead.eq(ahead - self.block_beats),
                ]
                m.next = "BLOCK"
            with m.Else():
                m.next = "IDLE"

        with m.FSM() as fsm:
            with m.State("IDLE"):
                m.d.sync += [stream_index.eq(0), offset.eq(0), ahead.eq(self.i_beats)]
                with m.If(self.i_start):
                    m.next = "BLOCK"
            with m.State("BLOCK"):
                m.d.sync += address.eq(bases[stream_index] + offset)
                with m.If(last_block):
                    m.d.sync += left.eq(ahead)
                with m.Else():
                    m.d.sync += left.eq(self.block_beats)
                if self.narrow:
                    numbers = enumerate(self.narrow)
                    is_narrow = ((stream_index == n) & self.i_narrow[i] for i, n in numbers)
                    with m.If(Cat(is_narrow).any()):
                        m.d.sync += [
                            address.eq(bases[stream_index] + (offset >> 1)),
                            left.eq((Mux(last_block, ahead, self.block_beats) + 1) >> 1),
                        ]
                if self.quantized:
                    block = offset >> exact_log2(self.block_beats)
                    with m.If(Cat(stream_index == n for n in self.quantized).any()):
                        m.d.sync += [
                            address.eq(bases[stream_index] + (offset >> 2) + block),
                            left.eq(((Mux(last_block, ahead, self.block_beats) + 3) >> 2) + 1),
                        ]
                m.next = "SIZE"
                if self.optional:
                    with m.If(~self.i_use.bit_select(stream_index, 1)):
                        next_block()
            with m.State("SIZE"):
                m.d.sync += length.eq(to_boundary)
                with m.If(left < to_boundary):
                    m.d.sync += length.eq(left)
                m.next = "OFFER"
            with m.State("OFFER"):
                m.d.comb += self.o.valid.eq(1)
                with m.If(self.o.ready):
                    m.d.sync += [address.eq(address + length), left.eq(left - length)]
                    with m.If(~block_ends):
                        m.next = "SIZE"
                    with m.Else():
                        next_block()
            m.d.comb += self.o_idle.eq(fsm.ongoing("IDLE"))
        return ResetInserter(self.i_clear)(m)
