"""A FIFO of beats that outputs only whole packets."""

from amaranth import Elaboratable, Module, Signal
from amaranth.hdl import ShapeLike
from amaranth.lib import data, stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2


class PacketFifo(wiring.Component):
    """Stores beats of packets, and drops the packets that end with `discontinue`.

    A packet is output once its last beat was taken. A packet of more than `depth` beats blocks the
    FIFO.

    *Timing*: the first beat is at the output two cycles after the last was taken; a beat a cycle.

    Parameters
    ----------
    shape : shape of a beat; a structure with `last` and `discontinue`.
    depth : beats, a power of two.

    Members
    -------
    i, o : beats.
    """

    def __init__(self, shape: ShapeLike, *, depth: int) -> None:
        if depth < 1 or depth & (depth - 1):
            raise ValueError(f"Depth must be a power of two, not {depth!r}")
        self.shape = data.Layout.cast(shape)
        self.depth = depth
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.memory = memory = Memory(shape=self.shape, depth=self.depth, init=[])
        write_port, read_port = memory.write_port(), memory.read_port()
        width = ceil_log2(self.depth) + 1
        written = Signal(width)
        committed = Signal(width)
        read = Signal(width)
        used = Signal(width)
        put = Signal()
        fetch = Signal()
        m.d.comb += [
            used.eq(written - read),
            self.i.ready.eq(~used[-1]),
            put.eq(self.i.valid & self.i.ready),
            fetch.eq((committed != read) & (~self.o.valid | self.o.ready)),
            write_port.addr.eq(written),
            write_port.data.eq(self.i.payload),
            write_port.en.eq(put),
            read_port.addr.eq(read),
            read_port.en.eq(fetch),
            self.o.payload.eq(read_port.data),
        ]
        with m.If(put):
            m.d.sync += written.eq(written + 1)
            with m.If(self.i.payload.last & self.i.payload.discontinue):
                m.d.sync += written.eq(committed)
            with m.Elif(self.i.payload.last):
                m.d.sync += committed.eq(written + 1)
        with m.If(fetch):
            m.d.sync += [read.eq(read + 1), self.o.valid.eq(1)]
        with m.Elif(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        return m
