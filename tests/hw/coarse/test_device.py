"""Builds two memory devices on one link; the host's driver uses them in cocotb."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.coarse.pair import CoarsePair
from nearstep_sim.verilate.build import verilog_of
from nearstep_spec.coarse.config import CoarseConfig

TOP = "coarse_pair"
HERE = Path(__file__).parent
SMALL = {
    "groups": 2,
    "alus": 4,
    "entry_phits": 8,
    "buffer_entries": 4,
    "chunks_ahead": 2,
    "queue_jobs": 2,
    "snapshot_pages": 8,
    "memory_bytes": 1 << 16,
}
CHECKS = re.compile(r"(\w+): (\d+) checks")
MODES = ("free", "source", "sink", "both")
BENCHES = {
    *(f"reductions_are_those_of_the_golden_ring/mode={mode}" for mode in MODES),
    *(f"a_snapshot_and_the_host_while_jobs_run/mode={mode}" for mode in ("free", "both")),
    "a_job_that_is_refused_ends_all",
}


def bench(*, seed: int, **changes: object) -> int:
    """Run every bench on a pair of devices; the number of checks that were made."""
    config = CoarseConfig(**{**SMALL, **changes})
    verilog = verilog_of(f"{TOP} {config!r}", lambda: to_verilog(CoarsePair(config), TOP))
    result = run_cocotb(
        top=TOP,
        verilog=verilog,
        test_module=HERE / "cocotb_device.py",
        env={
            "NEARSTEP_CONFIG": json.dumps(dataclasses.asdict(config)),
            "NEARSTEP_SEED": str(seed),
        },
        seed=seed,
    )
    made = {name: int(count) for name, count in CHECKS.findall(result.log.read_text())}
    print(f"seed {seed}: {len(result.tests)} benches passed, checks {made}")
    assert set(result.tests) == BENCHES
    assert len(made) == len(BENCHES)
    assert all(made.values())
    return sum(made.values())


@pytest.mark.cocotb
@pytest.mark.deep
def test_the_driver_runs_on_two_devices():
    assert bench(seed=1) > 10_000


@pytest.mark.cocotb
@pytest.mark.deep
@pytest.mark.parametrize(
    "changes",
    [{"alus": 16}, {"alus": 8, "entry_phits": 16, "groups": 1}, {"groups": 4}],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()),
)
def test_other_shapes(changes):
    assert bench(seed=2, **changes) > 10_000
