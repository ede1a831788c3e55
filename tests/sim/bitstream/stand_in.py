"""A small design on an ULX3S, for tests of the flow, that is placed and routed soon."""

from amaranth import Cat, ClockSignal, Elaboratable, Instance, Module, Signal
from amaranth.build.run import BuildPlan
from amaranth.lib import io, wiring
from amaranth.lib.memory import Memory
from amaranth.lib.wiring import In, Out
from amaranth_boards.ulx3s import ULX3S_85F_Platform

from nearstep_hw.fp.pipeline import MULT18X18D
from nearstep_hw.fp.unit import FpUnit, arithmetic
from nearstep_spec.fp import FpFormat

NAME = "top"
BOARD_HZ = 25e6
SUMS, ROWS = 2, 1024
SMALL = FpFormat(4, 3)


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
    """A counter, two sums in a row, a multiplier of small numbers, and a light.

    Parameters
    ----------
    memories : block RAMs beside them, that the light depends on.
    """

    def __init__(self, memories: int = 0) -> None:
        self.memories = memories

    def elaborate(self, platform: ULX3S_85F_Platform) -> Module:
        m = Module()
        count = Signal(16)
        m.submodules.light = light = io.Buffer("o", platform.request("led", 0, dir="-"))
        m.d.sync += count.eq(count + 1)
        value = count
        for number in range(SUMS):
            m.submodules[f"sum{number}"] = each = Sum(ROWS)
            m.d.comb += each.i.eq(value)
            value = each.o
        bits = Signal(self.memories)
        for number in range(self.memories):
            m.submodules[f"memory{number}"] = Instance(
                "DP16KD", i_CLKA=ClockSignal(), i_ADA4=count[0], o_DOA0=bits[number]
            )
        m.submodules.unit = unit = FpUnit(arithmetic("mul", SMALL), multiplier=MULT18X18D)
        m.d.comb += [unit.i_a.eq(Cat(value, count)), unit.i_b.eq(Cat(count, value))]
        m.d.sync += light.o.eq(unit.o_z.xor() ^ bits.xor())
        return m


def stand_in_plan(*, clock_hz: float = BOARD_HZ, memories: int = 0) -> BuildPlan:
    """The plan of the design, whose clock must reach a frequency."""
    plan: BuildPlan = ULX3S_85F_Platform().prepare(StandIn(memories), NAME, emit_src=False)
    preferences = plan.files[f"{NAME}.lpf"]
    assert preferences.count(f"{BOARD_HZ} HZ") == 1
    plan.files[f"{NAME}.lpf"] = preferences.replace(f"{BOARD_HZ} HZ", f"{clock_hz} HZ")
    return plan
