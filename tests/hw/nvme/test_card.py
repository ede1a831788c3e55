"""Builds `nvme_card` as `nearstep rtl` writes it, and runs its cocotb benches."""

from pathlib import Path

import pytest

from nearstep_hw.generate import verilog
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.verilate.build import verilog_of

pytestmark = pytest.mark.cocotb

HERE = Path(__file__).parent
MODES = ("free", "source", "sink", "both")


@pytest.mark.deep
@pytest.mark.parametrize("stall", MODES)
def test_a_host_and_firmware_see_what_the_controller_in_python_shows(stall: str) -> None:
    seed = 1 + MODES.index(stall)
    done = run_cocotb(
        top="nvme_card",
        verilog=verilog_of("generator nvme_card", lambda: verilog("nvme_card")),
        test_module=HERE / "cocotb_card.py",
        env={"NEARSTEP_STALL": stall, "NEARSTEP_SEED": str(seed), "NEARSTEP_COUNT": "60"},
    )
    for line in done.log.read_text().splitlines():
        if " checks" in line:
            print(f"seed {seed}, {stall}: {line.split('test ', 1)[-1].strip()}")
    assert len(done.tests) == 2
