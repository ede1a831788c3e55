"""Builds the DDR4 controller and runs its cocotb bench."""

from pathlib import Path

import pytest

from nearstep_hw.dram.controller import DramController
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.verilate.build import verilog_of

pytestmark = [pytest.mark.cocotb, pytest.mark.deep]

TOP = "dram_controller"
BENCH = Path(__file__).with_name("cocotb_controller.py")
TESTS = 7  # four of them the stall modes


def verilog() -> Path:
    return verilog_of(TOP, lambda: to_verilog(DramController(), TOP))


@pytest.mark.parametrize("seed", [1, 2])
def test_a_master_written_by_others_reads_what_it_wrote(seed: int) -> None:
    result = run_cocotb(
        top=TOP,
        verilog=verilog(),
        test_module=BENCH,
        env={"NEARSTEP_SEED": str(seed)},
        seed=seed,
    )
    print(f"seed {seed}: {result.tests}")
    assert len(result.tests) == TESTS
