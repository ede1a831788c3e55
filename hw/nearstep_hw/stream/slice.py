"""A register slice: a stream cut by registers in both directions."""

from amaranth import Elaboratable, Module, Signal
from amaranth.hdl import ShapeLike
from amaranth.lib import stream, wiring
from amaranth.lib.wiring import In, Out


class StreamSlice(wiring.Component):
    """Register slice: registers both valid and ready.

    *Timing*: one cycle of latency, a payload a cycle. Holds two payloads.

    Parameters
    ----------
    shape : shape of the payload.

    Members
    -------
    i, o : the streams.
    """

    def __init__(self, shape: ShapeLike) -> None:
        self.shape = shape
        super().__init__({"i": In(stream.Signature(shape)), "o": Out(stream.Signature(shape))})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        full = Signal()
        spare = Signal(self.shape, reset_less=True)
        payload = Signal(self.shape, reset_less=True)
        free = ~self.o.valid | self.o.ready

        m.d.comb += [self.i.ready.eq(~full), self.o.payload.eq(payload)]
        with m.If(free):
            m.d.sync += [self.o.valid.eq(full | self.i.valid), full.eq(0)]
            with m.If(full):
                m.d.sync += payload.eq(spare)
            with m.Else():
                m.d.sync += payload.eq(self.i.payload)
        with m.Elif(self.i.valid & ~full):
            m.d.sync += [spare.eq(self.i.payload), full.eq(1)]
        return m
