"""Resources of a chip from the cells that Yosys names."""

import pytest
from amaranth import Module
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.verilog import to_verilog
from nearstep_sim.synthesis import (
    AREA,
    ECP5_AREA,
    ecp5_area,
    ecp5_cells,
    ultrascale_plus_area,
    ultrascale_plus_cells,
)


def test_cells_become_resources() -> None:
    cells = {
        "DSP48E2": 12,
        "LUT2": 3,
        "LUT6": 4,
        "FDRE": 5,
        "FDSE": 6,
        "CARRY4": 9,
        "BUFG": 1,
        "RAM32M16": 2,
        "SRL16E": 3,
        "RAMB18E2": 5,
        "RAMB36E2": 1,
    }
    area = ultrascale_plus_area(cells)
    assert tuple(area) == AREA
    assert area == {"dsp": 12, "lut": 7, "lut_memory": 19, "ff": 11, "bram36": 3.5}


def test_cells_of_an_ecp5_become_what_nextpnr_counts() -> None:
    # A unit of axpby: nextpnr reports 1973 logic, 510 carry, 32 and 16 memory LUTs, 2531 together.
    cells = {
        "LUT4": 1973,
        "CCU2C": 255,
        "TRELLIS_DPR16X4": 8,
        "TRELLIS_FF": 904,
        "MULT18X18D": 8,
        "DP16KD": 3,
        "PFUMX": 90,
    }
    area = ecp5_area(cells)
    assert tuple(area) == ECP5_AREA
    assert area == {"dsp": 8, "lut": 2483, "lut_memory": 48, "ff": 904, "bram18": 3}
    assert area["lut"] + area["lut_memory"] == 2531


def test_a_memory_of_unknown_size_is_an_error() -> None:
    with pytest.raises(KeyError, match="RAM512X1S"):
        ultrascale_plus_area({"RAM512X1S": 1})


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


@pytest.mark.deep
def test_a_module_that_is_boxed_counts_as_one_cell_of_its_name() -> None:
    verilog = to_verilog(Pair(), "pair")
    assert ultrascale_plus_area(ultrascale_plus_cells(verilog, "pair"))["ff"] == 16
    cells = ultrascale_plus_cells(verilog, "pair", boxes="*.inner")
    assert ultrascale_plus_area(cells)["ff"] == 8
    assert [count for name, count in cells.items() if name.endswith("pair.inner")] == [1]
    cells = ecp5_cells(verilog, "pair")
    assert ecp5_area(cells) == {"dsp": 0, "lut": 0, "lut_memory": 0, "ff": 16, "bram18": 0}
    assert ecp5_area(ecp5_cells(verilog, "pair", boxes="*.inner"))["ff"] == 8


ELEMENTS = """
module counter(input clk, input [7:0] i, output reg [7:0] o);
  always @(posedge clk) o <= i + 1;
endmodule
module top(input clk, input [7:0] a, b, output [7:0] y);
  wire [7:0] x;
  wire [7:0] \\x[0] ;
  counter c0(.clk(clk), .i(a), .o(x));
  counter c1(.clk(clk), .i(b), .o(\\x[0] ));
  assign y = x ^ \\x[0] ;
endmodule
"""
"""Names as Amaranth gives them to elements of arrays, on boundaries of modules."""


def test_names_of_elements_are_not_taken_for_bits() -> None:
    """Without `rename -hide` Yosys ends with an assertion, or joins the two silently."""
    cells = ultrascale_plus_cells(ELEMENTS, "top", flat=False)
    print(dict(cells))
    area = ultrascale_plus_area(cells)
    assert area["ff"] == 16
    assert area["lut"] >= 8
