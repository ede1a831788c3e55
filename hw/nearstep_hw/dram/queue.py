"""A short queue of beats or bursts."""

from amaranth import Elaboratable, Module
from amaranth.hdl import Shape, ShapeLike
from amaranth.lib import stream, wiring
from amaranth.lib.fifo import SyncFIFO
from amaranth.lib.wiring import In, Out


class ShortQueue(wiring.Component):
    """FIFO in distributed RAM: a payload is at the output a cycle after its input.

    Amaranth's `SyncFIFO` with stream ports.

    Parameters
    ----------
    shape : of the payload.
    depth : payloads.

    Members
    -------
    i, o : the streams.
    o_level : payloads inside.
    """

    def __init__(self, shape: ShapeLike, *, depth: int) -> None:
        self.shape = shape
        self.depth = depth
        super().__init__(
            {
                "i": In(stream.Signature(shape)),
                "o": Out(stream.Signature(shape)),
                "o_level": Out(range(depth + 1)),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        width = Shape.cast(self.shape).width
        m.submodules.fifo = fifo = SyncFIFO(width=width, depth=self.depth)
        m.d.comb += [
            fifo.w_data.eq(self.i.payload),
            fifo.w_en.eq(self.i.valid),
            self.i.ready.eq(fifo.w_rdy),
            self.o.payload.eq(fifo.r_data),
            self.o.valid.eq(fifo.r_rdy),
            fifo.r_en.eq(self.o.ready),
            self.o_level.eq(fifo.level),
        ]
        return m
