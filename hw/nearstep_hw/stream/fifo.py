"""A stream FIFO that fits block RAM."""

from amaranth import Elaboratable, Module, ResetInserter, Signal
from amaranth.hdl import ShapeLike
from amaranth.lib import stream, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth.utils import ceil_log2


class StreamFifo(wiring.Component):
    """First in, first out, with a registered memory read.

    The read register of the memory is the output, so a wide payload is copied only twice. Holds
    `depth` payloads in memory and one at the output.

    *Timing*: a payload is at the output two cycles after it was taken; one payload a cycle.

    Parameters
    ----------
    shape : shape of the payload.
    depth : payloads in memory, a power of two.

    Members
    -------
    i, o : the streams.
    i_clear : clears all state; a payload taken in this cycle is lost.

    Raises
    ------
    ValueError : `depth` is not a power of two.
    """

    def __init__(self, shape: ShapeLike, *, depth: int) -> None:
        if depth < 1 or depth & (depth - 1):
            raise ValueError(f"Depth must be a power of two, not {depth!r}")
        self.shape = shape
        self.depth = depth
        super().__init__(
            {
                "i": In(stream.Signature(shape)),
                "o": Out(stream.Signature(shape)),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.memory = memory = Memory(shape=self.shape, depth=self.depth, init=[])
        write_port = memory.write_port()
        read_port = memory.read_port()

        pointer_width = ceil_log2(self.depth) + 1
        written = Signal(pointer_width)
        read = Signal(pointer_width)
        stored = Signal(pointer_width)
        put = Signal()
        fetch = Signal()

        m.d.comb += [
            stored.eq(written - read),
            self.i.ready.eq(~stored[-1]),
            put.eq(self.i.valid & self.i.ready),
            fetch.eq((stored != 0) & (~self.o.valid | self.o.ready)),
            write_port.addr.eq(written),
            write_port.data.eq(self.i.payload),
            write_port.en.eq(put),
            read_port.addr.eq(read),
            read_port.en.eq(fetch),
            self.o.payload.eq(read_port.data),
        ]
        with m.If(put):
            m.d.sync += written.eq(written + 1)
        with m.If(fetch):
            m.d.sync += [read.eq(read + 1), self.o.valid.eq(1)]
        with m.Elif(self.o.ready):
            m.d.sync += self.o.valid.eq(0)
        return ResetInserter(self.i_clear)(m)
