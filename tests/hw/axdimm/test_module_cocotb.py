"""Builds the module and runs its cocotb bench."""

import json
from pathlib import Path

import pytest

from nearstep_hw.axdimm.module import AxdimmModule
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.updater import stand_in
from nearstep_sim.updater.stand_in import StandInUnit
from nearstep_sim.verilate.build import verilog_of
from nearstep_spec.updater.config import AdamKernelConfig

pytestmark = [pytest.mark.cocotb, pytest.mark.deep]

HERE = Path(__file__).parent
TOP = "axdimm_module"
OPTIONS = {"functional_units": 1, "block_bytes": 512, "windows": 1, "bursts_ahead": 8}


def test_one_driver_runs_both_channels() -> None:
    config = AdamKernelConfig(**OPTIONS)
    source = Path(stand_in.__file__).read_text()
    verilog = verilog_of(
        f"{TOP} {config!r} {source}",
        lambda: to_verilog(AxdimmModule(config, unit=StandInUnit), TOP),
    )
    result = run_cocotb(
        top=TOP,
        verilog=verilog,
        test_module=HERE / "cocotb_module.py",
        env={"NEARSTEP_CONFIG": json.dumps(OPTIONS), "NEARSTEP_SEED": "1"},
        seed=1,
    )
    print(f"seed 1: {result.tests}")
    assert len(result.tests) == 2
