"""Builds the Adam kernel and runs its cocotb benches."""

import json
from pathlib import Path

import pytest
from nearstep_hw.axdimm.adam_kernel import AdamKernel
from nearstep_hw.axdimm.config import AdamKernelConfig
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.build import to_verilog, verilog_of

from .stand_in import StandInUnit

HERE = Path(__file__).parent
TOP = "adam_kernel"
UNITS = {"stand_in": StandInUnit, "adam": FunctionalUnit}
FAST = {"lanes": 4, "functional_units": 2, "block_bytes": 256}


def bench(module, unit, options, testcase=None):
    config = AdamKernelConfig(**options)
    source = Path(HERE / "stand_in.py").read_text() if unit == "stand_in" else ""
    verilog = verilog_of(
        f"{TOP} {unit} {config!r} {source}",
        lambda: to_verilog(AdamKernel(config, unit=UNITS[unit]), TOP),
    )
    result = run_cocotb(
        top=TOP,
        verilog=verilog,
        test_module=HERE / f"{module}.py",
        testcase=testcase,
        env={"NEARSTEP_CONFIG": json.dumps(options), "NEARSTEP_UNIT": unit},
        seed=1,
    )
    print(f"{len(result.tests)} benches passed: {', '.join(result.tests)}")
    return result


def test_every_size_with_every_stall_mode():
    assert len(bench("cocotb_kernel_runs", "stand_in", FAST).tests) >= 4
