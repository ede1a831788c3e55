"""The adapter to the 7-series block: by itself, and the benches of the endpoint through it."""

import re
from pathlib import Path

import pytest

from nearstep_hw.pcie.series7.adapter import Series7Adapter
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import BenchResult, run_cocotb
from nearstep_sim.verilate.build import verilog_of

from .test_endpoint import ANY, COUNTS
from .test_endpoint import bench as endpoint_bench

pytestmark = pytest.mark.cocotb

HERE = Path(__file__).parent
TOP = "series7_adapter"
APERTURES = {0: 13, 2: 34}
CHECKS = re.compile(r": (\d+) checks,")
SHORTEST = (
    "requests_become_frames/mode=both/form=free",
    "every_length_and_alignment",
    "reads_are_held_back_and_writes_pass_them/late=0",
    "reads_are_held_back_and_writes_pass_them/late=40",
    "completions_and_messages_become_packets/mode=both",
    "what_the_host_has_configured",
    "the_checkers_are_heard",
)
ALL = 12 + 4 + 5
"""Benches of the adapter by itself."""


def bench(*, seed: int, count: int, testcase: str | None = None) -> BenchResult:
    """Run the benches of the adapter by itself; each has made checks."""
    verilog = verilog_of(TOP, lambda: to_verilog(Series7Adapter(APERTURES), TOP))
    result = run_cocotb(
        top=TOP,
        verilog=verilog,
        test_module=HERE / "cocotb_series7.py",
        testcase=testcase,
        env={"NEARSTEP_SEED": str(seed), "NEARSTEP_COUNT": str(count)},
        seed=seed,
    )
    made = [int(number) for number in CHECKS.findall(result.log.read_text())]
    print(f"seed {seed}: {len(result.tests)} benches passed, checks {made}")
    assert len(made) == len(result.tests)
    assert all(made)
    return result


@pytest.mark.deep
def test_the_adapter_by_itself():
    assert len(bench(seed=1, count=40, testcase=",".join(SHORTEST)).tests) == len(SHORTEST)


@pytest.mark.deep
@pytest.mark.parametrize("seed", [2, 3])
def test_the_adapter_in_every_form(seed):
    assert len(bench(seed=seed, count=400).tests) == ALL


@pytest.mark.deep
@pytest.mark.parametrize("crossed", [False, True], ids=["one_clock", "crossed"])
@pytest.mark.parametrize("module", [name for name in COUNTS if name != "cocotb_endpoint_rate"])
def test_the_endpoint_behind_the_adapter(module, crossed):
    some = module == "cocotb_endpoint" and not crossed  # NiteFury has two clocks
    case, count = (",".join(ANY), len(ANY)) if some else (None, COUNTS[module])
    result = endpoint_bench(module, testcase=case, series7=True, crossed=crossed)
    assert len(result.tests) == count
