"""A watchdog timer."""

from amaranth import Elaboratable, Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out


class Timeout(wiring.Component):
    """Expires when `i_run` has been high for `cycles`.

    Members
    -------
    i_run : count; low resets the timer.
    o_expired : `i_run` was high for `cycles`; a register.

    Raises
    ------
    ValueError : `cycles` is not positive.
    """

    def __init__(self, cycles: int) -> None:
        if cycles < 1:
            raise ValueError(f"Cycles must be at least 1, not {cycles!r}")
        self.cycles = cycles
        super().__init__({"i_run": In(1), "o_expired": Out(1)})

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        left = Signal(range(self.cycles), init=self.cycles - 1)
        with m.If(~self.i_run):
            m.d.sync += [left.eq(self.cycles - 1), self.o_expired.eq(0)]
        with m.Else():
            m.d.sync += [left.eq(left - 1), self.o_expired.eq(self.o_expired | (left == 0))]
        return m
