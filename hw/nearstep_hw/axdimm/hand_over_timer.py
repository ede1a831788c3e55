"""Duration of hand-overs."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

CYCLE_BITS = 32


class HandOverTimer(wiring.Component):
    """Measures the cycles from a request of a mode to the mode: the last and the longest.

    A request that is withdrawn before completion is not counted. Counts saturate.

    Members
    -------
    i_request : the mode is requested.
    i_reached : the mode is reached.
    i_clear : clear `o_longest`.
    o_last, o_longest : cycles.
    """

    i_request: In(1)
    i_reached: In(1)
    i_clear: In(1)
    o_last: Out(CYCLE_BITS)
    o_longest: Out(CYCLE_BITS)

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        cycles = Signal(CYCLE_BITS)
        waiting = Signal()
        with m.If(self.i_clear):
            m.d.sync += self.o_longest.eq(0)
        m.d.sync += waiting.eq(self.i_request & ~self.i_reached)
        with m.If(~self.i_request | self.i_reached):
            m.d.sync += cycles.eq(0)
        with m.Elif(~cycles.all()):
            m.d.sync += cycles.eq(cycles + 1)
        with m.If(waiting & self.i_request & self.i_reached):
            m.d.sync += self.o_last.eq(cycles)
            with m.If((cycles > self.o_longest) | self.i_clear):
                m.d.sync += self.o_longest.eq(cycles)
        return m
