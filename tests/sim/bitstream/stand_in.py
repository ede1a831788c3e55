"""A small design on an ULX3S, for tests of the flow: it takes seconds to place and route."""

from amaranth import Elaboratable, Module, Signal
from amaranth.build.run import BuildPlan
from amaranth.lib import wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth_boards.ulx3s import ULX3S_85F_Platform

NAME = "top"


class Sum(wiring.Component):
    """The sum of the last words, in a block RAM.

    Parameters
    ----------
    rows : of the memory.

    Members
    -------
    i, o : words.
    """

    def __init__(self, rows: int) -> None:
        self.rows = rows
        super().__init__({"i": In(16), "o": Out(16)})

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.memory = memory = Memory(shape=16, depth=self.rows, init=[])
        write, read = memory.write_port(), memory.read_port()
        index = Signal(range(self.rows))
        product = Signal(16)
        m.d.comb += [
            write.en.eq(1),
            write.addr.eq(index),
            write.data.eq(self.i),
            read.en.eq(1),
            read.addr.eq(index + 1),
        ]
        m.d.sync += [
            index.eq(index + 1),
            product.eq(self.i * read.data),
            self.o.eq(self.o + product),
        ]
        return m


class StandIn(Elaboratable):
    """A counter, two sums in a row, and a light.

    Parameters
    ----------
    clock_hz : that the clock must reach; the board has 25 MHz.
    sums : how many.
    rows : of each memory.
    """

    def __init__(self, clock_hz: float = 25e6, sums: int = 2, rows: int = 1024) -> None:
        self.clock_hz = clock_hz
        self.sums = sums
        self.rows = rows

    def elaborate(self, platform: ULX3S_85F_Platform) -> Module:
        m = Module()
        count = Signal(16)
        light = platform.request("led", 0)
        m.d.sync += count.eq(count + 1)
        value = count
        for number in range(self.sums):
            m.submodules[f"sum{number}"] = each = Sum(self.rows)
            m.d.comb += each.i.eq(value)
            value = each.o
        m.d.sync += light.o.eq(value[-1])
        return m


def stand_in_plan(clock_hz: float = 25e6, sums: int = 2, rows: int = 1024) -> BuildPlan:
    """The plan of the design."""
    platform = ULX3S_85F_Platform()
    plan: BuildPlan = platform.prepare(StandIn(clock_hz, sums, rows), NAME)
    if clock_hz != 25e6:
        before = "FREQUENCY PORT \"clk25_0__io\" 25000000.0 HZ;"
        preferences = plan.files[f"{NAME}.lpf"]
        assert before in preferences
        plan.files[f"{NAME}.lpf"] = preferences.replace("25000000.0", f"{clock_hz:.1f}")
    return plan
