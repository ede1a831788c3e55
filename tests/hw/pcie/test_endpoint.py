"""Builds the endpoint and runs its cocotb benches below a root complex."""

import json
from pathlib import Path

import pytest

from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import BenchResult, run_cocotb
from nearstep_sim.build import verilog_of

from .endpoint_block import BlockConfig, EndpointBlock

pytestmark = pytest.mark.cocotb

HERE = Path(__file__).parent
TOP = "endpoint_block"


def bench(
    module: str, *, seed: int = 1, testcase: str | None = None, **options: int
) -> BenchResult:
    """Runs the benches of `module` on an endpoint as `options` say."""
    config = BlockConfig(**options)
    source = (HERE / "endpoint_block.py").read_text()
    verilog = verilog_of(
        f"{TOP} {config!r} {source}", lambda: to_verilog(EndpointBlock(config), TOP)
    )
    result = run_cocotb(
        top=TOP,
        verilog=verilog,
        test_module=HERE / f"{module}.py",
        testcase=testcase,
        env={"NEARSTEP_CONFIG": json.dumps(options), "NEARSTEP_SEED": str(seed)},
        seed=seed,
    )
    text = result.log.read_text()
    for line in text.splitlines():
        if " checks" in line:
            print(line.split("test ", 1)[-1].strip())
    print(f"seed {seed}: {len(result.tests)} benches passed: {', '.join(result.tests)}")
    return result


def test_memory_is_read_and_written_in_every_stall_mode():
    assert len(bench("cocotb_endpoint").tests) == 14


def test_bad_requests_are_refused_and_change_nothing():
    assert len(bench("cocotb_endpoint_errors").tests) == 15


def test_order_of_reads_and_writes():
    assert len(bench("cocotb_endpoint_order").tests) == 6


def test_interrupts_reach_the_host():
    assert len(bench("cocotb_endpoint_msix").tests) == 6
