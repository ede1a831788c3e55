"""Area after synthesis: what is counted, and what is left out."""

from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.verilog import to_verilog
from nearstep_sim.synthesis import ultrascale_plus_area, ultrascale_plus_cells


class Register(wiring.Component):
    """Eight flip-flops."""

    i: In(8)
    o: Out(8)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.d.sync += self.o.eq(self.i)
        return m


class Pair(wiring.Component):
    """A register of its own behind one in a module."""

    i: In(8)
    o: Out(8)

    def elaborate(self, platform: object) -> Module:
        m = Module()
        m.submodules.inner = inner = Register()
        m.d.comb += inner.i.eq(self.i)
        m.d.sync += self.o.eq(inner.o)
        return m


def test_a_module_that_is_boxed_counts_as_one_cell_of_its_name() -> None:
    verilog = to_verilog(Pair(), "pair")
    assert ultrascale_plus_area(ultrascale_plus_cells(verilog, "pair"))["ff"] == 16
    cells = ultrascale_plus_cells(verilog, "pair", boxes="*.inner")
    assert ultrascale_plus_area(cells)["ff"] == 8
    assert [count for name, count in cells.items() if name.endswith("pair.inner")] == [1]
