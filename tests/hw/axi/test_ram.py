"""AxiRam under cocotb, with the manager of cocotbext-axi; its rate, and what it refuses."""

from pathlib import Path

import pytest

from nearstep_hw.axi.ram import AxiRam
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.verilate.build import verilog_of

HERE = Path(__file__).parent
OPTIONS = {"memory_bytes": 8192, "address_width": 16, "data_width": 64, "id_width": 4}
MODES = ("free", "source", "sink", "both")


@pytest.mark.deep
@pytest.mark.cocotb
@pytest.mark.parametrize("mode", MODES)
def test_bursts_reach_the_memory(mode: str) -> None:
    verilog = verilog_of(f"axi_ram {OPTIONS}", lambda: to_verilog(AxiRam(**OPTIONS), "axi_ram"))
    done = run_cocotb(
        top="axi_ram",
        verilog=verilog,
        test_module=HERE / "cocotb_ram.py",
        env={"NEARSTEP_STALL": mode, "NEARSTEP_SEED": str(11 + MODES.index(mode))},
    )
    assert len(done.tests) == 3


@pytest.mark.parametrize("memory_bytes", [0, 2048, 5000, 1 << 17])
def test_size_that_no_memory_has(memory_bytes: int) -> None:
    with pytest.raises(ValueError, match=f"from 4096 to 65536 bytes, not {memory_bytes}"):
        AxiRam(**{**OPTIONS, "memory_bytes": memory_bytes})
