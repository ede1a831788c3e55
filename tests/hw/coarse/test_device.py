"""Builds rings of memory devices as they are shipped; the host's driver uses them in cocotb."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.coarse.ring_top import SHARING, TOP, ring_verilog
from nearstep_spec.coarse.config import CoarseConfig

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
OF_KERNELS = {f"a_step_after_a_sum_has_the_bits_of_golden_devices/mode={mode}" for mode in MODES}


def bench(config: CoarseConfig, *, devices: int, seed: int, latency: int = 1) -> int:
    """Run every bench on a ring of devices; the number of checks that were made."""
    result = run_cocotb(
        top=TOP,
        verilog=ring_verilog(config, devices, latency),
        settings=SHARING,
        test_module=HERE / "cocotb_device.py",
        env={
            "NEARSTEP_CONFIG": json.dumps(dataclasses.asdict(config)),
            "NEARSTEP_DEVICES": str(devices),
            "NEARSTEP_SEED": str(seed),
        },
        seed=seed,
    )
    made = {name: int(count) for name, count in CHECKS.findall(result.log.read_text())}
    print(f"seed {seed}: {len(result.tests)} benches passed, checks {made}")
    expected = BENCHES | (OF_KERNELS if config.rules else set())
    assert set(result.tests) == expected
    assert len(made) == len(expected)
    assert all(made.values())
    return sum(made.values())


@pytest.mark.cocotb
@pytest.mark.deep
def test_the_driver_runs_on_two_devices():
    assert bench(CoarseConfig(**SMALL), devices=2, seed=1) > 10_000


@pytest.mark.cocotb
@pytest.mark.deep
@pytest.mark.parametrize(
    "changes",
    [{"alus": 16}, {"alus": 8, "entry_phits": 16, "groups": 1}, {"groups": 4}],
    ids=lambda changes: "-".join(f"{name}={value}" for name, value in changes.items()),
)
def test_other_shapes(changes):
    assert bench(CoarseConfig(**{**SMALL, **changes}), devices=2, seed=2) > 10_000


@pytest.mark.cocotb
@pytest.mark.deep
def test_the_driver_runs_on_a_ring_of_four_devices_as_they_are_shipped():
    assert bench(CoarseConfig(), devices=4, seed=3, latency=100) > 10_000


@pytest.mark.cocotb
@pytest.mark.deep
def test_the_driver_runs_on_devices_with_update_kernels_as_they_are_shipped():
    config = CoarseConfig(rules=("adam", "sgd"))
    assert bench(config, devices=2, seed=4, latency=100) > 10_000
