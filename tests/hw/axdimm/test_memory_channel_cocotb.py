"""Builds a memory channel and runs its cocotb bench."""

from pathlib import Path

import pytest

from nearstep_hw.axdimm.memory_channel import MemoryChannel
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.verilate.build import verilog_of

pytestmark = [pytest.mark.cocotb, pytest.mark.deep]

TOP = "memory_channel"
BENCH = Path(__file__).with_name("cocotb_memory_channel.py")
TESTS = 6  # four of them the stall modes


@pytest.mark.parametrize("seed", [1, 2])
def test_host_and_kernel_take_turns(seed: int) -> None:
    result = run_cocotb(
        top=TOP,
        verilog=verilog_of(TOP, lambda: to_verilog(MemoryChannel(), TOP)),
        test_module=BENCH,
        env={"NEARSTEP_SEED": str(seed)},
        seed=seed,
    )
    print(f"seed {seed}: {result.tests}")
    assert len(result.tests) == TESTS
