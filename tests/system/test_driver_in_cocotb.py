"""The driver that runs in process also drives the kernel in cocotb."""

import json
from pathlib import Path

import pytest

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.update_kernel import UpdateKernel
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.verilate.build import verilog_of
from nearstep_spec.updater.config import UpdateKernelConfig

TOP = "adam_kernel"


@pytest.mark.cocotb
@pytest.mark.deep
def test_the_driver_runs_unchanged_in_cocotb():
    options = {"lanes": 2, "functional_units": 1, "block_bytes": 256}
    config = UpdateKernelConfig(**options)
    verilog = verilog_of(
        f"{TOP} adam {config!r} ",
        lambda: to_verilog(UpdateKernel(config, unit=FunctionalUnit), TOP),
    )
    result = run_cocotb(
        top=TOP,
        verilog=verilog,
        test_module=Path(__file__).parent / "cocotb_driver.py",
        env={"NEARSTEP_CONFIG": json.dumps(options)},
    )
    assert len(result.tests) == 2
