"""What an event-driven simulator makes of generated Verilog, on the smallest case of each fault."""

import pytest
from amaranth.hdl import Module, Signal
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.verilog import flat_ports, to_verilog

from .event_driven import (
    STANDARDS,
    blind,
    combinational_blocks,
    output_bench,
    qualifier,
    simulate,
)

BENCH = """module bench;
reg clk, rst, i; wire [7:0] o_comb, o_state, o_sync;
parts dut (.clk(clk), .rst(rst), .i(i), .o_comb(o_comb), .o_state(o_state), .o_sync(o_sync));
initial begin
  clk = 0; rst = 0; i = 0; #1;
  $display("%b %b %b", o_comb, o_state, o_sync);
  i = 1; clk = 1; #1;
  $display("%b %b %b", o_comb, o_state, o_sync);
end
endmodule
"""


class Parts(wiring.Component):
    """Constant parts beside parts that a condition drives, and a condition that never changes."""

    i: In(1)
    o_comb: Out(8)
    o_state: Out(8)
    o_sync: Out(8)

    def elaborate(self, platform):
        m = Module()
        idle = Signal(init=1)
        m.d.sync += idle.eq(idle)
        m.d.comb += self.o_comb[4:8].eq(0b1010)
        with m.If(self.i):
            m.d.comb += self.o_comb[0:3].eq(5)
        with m.If(idle):
            m.d.comb += self.o_state.eq(0x5A)
        m.d.comb += self.o_sync[6:8].eq(0b01)
        with m.If(self.i):
            m.d.sync += self.o_sync[0:2].eq(3)
        return m


@pytest.fixture(scope="module")
def parts():
    return to_verilog(Parts(), "parts")


def test_every_block_reads_a_variable(parts):
    bodies = combinational_blocks(parts)
    assert len(bodies) == parts.count("always @*") >= 4
    assert not any(map(blind, bodies))
    assert parts.count("initial \\$start  <= 1'h0;") == 1
    assert "verilog_backend" not in parts


def test_a_block_of_constants_is_found():
    blocks = combinational_blocks(
        "  always @*\n    x[9:8] = 2'h0;\n  always @*\n    x[7] = y;\n"
        "  always @* begin\n    \\$4  = 8'hab;\n    { a, b[1] } = 3'h1;\n  end\n"
        "  always @* begin\n    a = 1'h0;\n    casez (b)\n      1'h1:\n        a = 1'h1;\n"
        "    endcase\n  end\n"
    )
    assert list(map(blind, blocks)) == [True, False, True, False]


@pytest.mark.parametrize("standard", STANDARDS)
def test_constant_parts_and_initial_states_are_seen_at_time_0(parts, tmp_path, standard):
    (tmp_path / "parts.v").write_text(parts)
    (tmp_path / "bench.v").write_text(BENCH)
    said = simulate([tmp_path / "bench.v", tmp_path / "parts.v"], "bench", tmp_path, standard)
    assert said.split() == [
        *("10100000", "01011010", "01000000"),
        *("10100101", "01011010", "01000011"),
    ]


@pytest.mark.parametrize("standard", STANDARDS)
def test_an_unknown_output_is_found(tmp_path, standard):
    (tmp_path / "unit.v").write_text(
        "module unit(clk, rst, i, o); input clk, rst, i; output reg [1:0] o;\n"
        "always @(posedge clk) o[0] <= i;\nalways @* o[1] = 1'h0;\nendmodule\n"
    )
    ports = [("clk", "input", 1), ("rst", "input", 1), ("i", "input", 1), ("o", "output", 2)]
    (tmp_path / "bench.v").write_text(output_bench("unit", ports, 8))
    with pytest.raises(AssertionError, match="never trigger"):
        simulate([tmp_path / "bench.v", tmp_path / "unit.v"], "bench", tmp_path, standard)
    text = (tmp_path / "unit.v").read_text()
    (tmp_path / "unit.v").write_text(text.replace("always @* o[1] = 1'h0;", ""))
    said = simulate([tmp_path / "bench.v", tmp_path / "unit.v"], "bench", tmp_path, standard)
    assert "unknown 2 o X" in said
    assert "looked 8 unknown 8" in said


def test_data_may_be_unknown_only_where_a_valid_says_so():
    ports = {name for name, _, _ in flat_ports(Parts())}
    assert all(qualifier(name, ports) == () for name in ports)
    axi = {"m_axi__wvalid", "m_axi__wdata", "m_axi__awvalid", "m_axi__awlen", "o_interrupt"}
    assert qualifier("m_axi__wdata", axi) == ("m_axi__wvalid",)
    assert qualifier("m_axi__awlen", axi) == ("m_axi__awvalid",)
    assert qualifier("m_axi__wvalid", axi) == qualifier("o_interrupt", axi) == ()
