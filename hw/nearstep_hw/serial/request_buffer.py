"""Buffer of whole requests."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2

from nearstep_hw.serial.uart import BYTE_BITS
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_spec.serial.framing import CRC_BYTES
from nearstep_spec.serial.protocol import MOST_REQUEST

LENGTH_BITS = MOST_REQUEST.bit_length()
"""Bits of the length of a body."""


class RequestBuffer(wiring.Component):
    """Ring buffer of bytes that outputs only intact frames, and drops frames that do not fit.

    *Timing*: two cycles after `i_end` the length is at the output, the first byte a cycle later; a
    byte a cycle.

    Parameters
    ----------
    window : capacity in bodies of `MOST_REQUEST` bytes.

    Members
    -------
    i, i_end, i_drop : of a `Deframer`.
    o_length : length of the next body, to be taken before the bytes of the body.
    o : bytes of bodies, without gaps.
    o_dropped : strobe: a frame was damaged, or the buffer was full.

    Raises
    ------
    ValueError : `window` is not positive.
    """

    def __init__(self, *, window: int) -> None:
        if window < 1:
            raise ValueError(f"Window must be at least 1, not {window!r}")
        self.depth = 1 << ceil_log2(window * MOST_REQUEST + CRC_BYTES)
        self.lengths = StreamFifo(LENGTH_BITS, depth=1 << ceil_log2(window))
        super().__init__(
            {
                "i": In(stream.Signature(BYTE_BITS, always_ready=True)),
                "i_end": In(1),
                "i_drop": In(1),
                "o_length": Out(stream.Signature(LENGTH_BITS)),
                "o": Out(stream.Signature(BYTE_BITS)),
                "o_dropped": Out(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.lengths = lengths = self.lengths
        m.submodules.memory = memory = Memory(shape=BYTE_BITS, depth=self.depth, init=[])
        write_port, read_port = memory.write_port(), memory.read_port()
        wiring.connect(m, lengths.o, wiring.flipped(self.o_length))

        width = ceil_log2(self.depth) + 1
        written, committed, read = Signal(width), Signal(width), Signal(width)
        used = Signal(width)
        full, put, lost, keep = Signal(), Signal(), Signal(), Signal()
        fetch, fetched, move = Signal(), Signal(), Signal()
        none = -CRC_BYTES % (1 << LENGTH_BITS)
        length = Signal(LENGTH_BITS, init=none)  # of the body: starts at -CRC_BYTES
        m.d.comb += [
            used.eq(written - read),
            full.eq(used[-1]),
            put.eq(self.i.valid & ~full),
            write_port.addr.eq(written),
            write_port.data.eq(self.i.payload),
            write_port.en.eq(put),
            keep.eq(self.i_end & ~lost & lengths.i.ready),
            lengths.i.valid.eq(keep),
            lengths.i.payload.eq(length),
            move.eq(~self.o.valid | self.o.ready),
            fetch.eq((committed != read) & (~fetched | move)),
            read_port.addr.eq(read),
            read_port.en.eq(fetch),
        ]
        m.d.sync += self.o_dropped.eq(self.i_drop | (self.i_end & ~keep))
        with m.If(self.i_end | self.i_drop):
            m.d.sync += [lost.eq(0), length.eq(none), written.eq(committed)]
            with m.If(keep):
                m.d.sync += [
                    committed.eq(written - CRC_BYTES),
                    written.eq(written - CRC_BYTES),
                ]
        with m.Elif(self.i.valid):
            m.d.sync += [
                written.eq(written + put),
                length.eq(length + 1),
                lost.eq(lost | full),
            ]
        # The clock-to-output delay of a block RAM is long: a second register drives `o`.
        with m.If(fetch):
            m.d.sync += [read.eq(read + 1), fetched.eq(1)]
        with m.Elif(move):
            m.d.sync += fetched.eq(0)
        with m.If(move):
            m.d.sync += [self.o.valid.eq(fetched), self.o.payload.eq(read_port.data)]
        return m
