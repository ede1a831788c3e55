"""Builds two sync cores as they are shipped, side by side; a bench in cocotb joins them."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.coarse.ring_top import CORES, cores_verilog
from nearstep_spec.coarse.config import CoarseConfig

HERE = Path(__file__).parent
CHECKS = re.compile(r"(\w+): (\d+) checks")
BENCHES = {
    f"{name}/mode={mode}"
    for mode in ("free", "source", "sink", "both")
    for name in (
        "sums_are_those_of_the_golden_ring",
        "a_job_that_is_halted_leaves_nothing_behind",
    )
}


SMALL = {"alus": 4, "entry_phits": 4, "chunks_ahead": 1}

pytestmark = pytest.mark.cocotb


def bench(options, seed: int, testcase: str | None = None) -> dict[str, int]:
    """Run the benches, or one; the number of checks that each made."""
    config = CoarseConfig(**options)
    result = run_cocotb(
        top=CORES,
        verilog=cores_verilog(config, 2),
        test_module=HERE / "cocotb_sync_cores.py",
        testcase=testcase,
        env={"NEARSTEP_CONFIG": json.dumps(dataclasses.asdict(config)), "NEARSTEP_SEED": str(seed)},
        seed=seed,
    )
    made = {name: int(count) for name, count in CHECKS.findall(result.log.read_text())}
    print(f"seed {seed}: {len(result.tests)} benches passed, checks {made}")
    assert set(result.tests) == ({testcase} if testcase else BENCHES)
    assert len(made) == len(result.tests)
    assert min(made.values()) > 1000
    return made


def test_two_small_cores_sum_while_both_sides_stall():
    assert bench(SMALL, 18, "sums_are_those_of_the_golden_ring/mode=both")


@pytest.mark.deep
@pytest.mark.parametrize(
    "options",
    [{}, {"alus": 16, "entry_phits": 16}, SMALL],
    ids=["shipped", "wide", "small"],
)
def test_two_cores_give_the_bits_of_the_golden_ring(options):
    assert len(bench(options, 19)) == len(BENCHES)
