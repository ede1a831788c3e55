"""Builds the endpoint and runs its cocotb benches below a root complex."""

import json
from pathlib import Path

import pytest

from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import BenchResult, run_cocotb
from nearstep_sim.verilate.build import verilog_of

from ..event_driven import needs_icarus
from .endpoint_block import BlockConfig, block

pytestmark = pytest.mark.cocotb

HERE = Path(__file__).parent
TOP = "endpoint_block"


def bench(
    module: str,
    *,
    seed: int = 1,
    testcase: str | None = None,
    icarus: bool = False,
    **options: int,
) -> BenchResult:
    """Run the benches of `module` on an endpoint as `options` say."""
    config = BlockConfig(**options)
    source = (HERE / "endpoint_block.py").read_text()
    verilog = verilog_of(f"{TOP} {config!r} {source}", lambda: to_verilog(block(config), TOP))
    result = run_cocotb(
        top=TOP,
        verilog=verilog,
        test_module=HERE / f"{module}.py",
        testcase=testcase,
        env={"NEARSTEP_CONFIG": json.dumps(options), "NEARSTEP_SEED": str(seed)},
        seed=seed,
        icarus=icarus,
    )
    text = result.log.read_text()
    for line in text.splitlines():
        if " checks" in line or " beats in " in line:
            print(line.split("test ", 1)[-1].strip())
    print(f"seed {seed}: {len(result.tests)} benches passed: {', '.join(result.tests)}")
    return result


COUNTS = {
    "cocotb_endpoint": 14,
    "cocotb_endpoint_errors": 16,
    "cocotb_endpoint_order": 6,
    "cocotb_endpoint_msix": 6,
    "cocotb_endpoint_rate": 3,
}
"""Benches in each module."""


ANY = ("any_length_and_alignment/mode=both", "any_byte_enables/mode=both",
       "completions_are_as_large_as_the_host_allows/max_payload=256",
       "a_peer_reads_and_writes/mode=both")  # fmt: skip

SHAPES = [
    {"width": 64, "data_width": 64},
    {"width": 64, "vectors": 1},
    {"width": 128, "data_width": 256},
    {"width": 256, "vectors": 40},
    {"width": 512, "data_width": 512},
    {"width": 512, "data_width": 1024},
    {"width": 64, "crossed": True},
    {"width": 128, "crossed": True},
    {"width": 256, "crossed": True},
    {"width": 512, "crossed": True},
]
EVERY = [SHAPES[0], SHAPES[3], SHAPES[5], SHAPES[7]]
"""Shapes for all modules: each width, the narrowest and the widest data, many vectors, two clocks.
The others are for what depends on lengths and for rates, which need one clock: that of a card,
200 MHz, is slower than the link."""

OTHERS = [
    pytest.param(module, shape, id="-".join(map(str, (module, *shape.values()))))
    for module in COUNTS
    for shape in SHAPES
    if module == "cocotb_endpoint"
    or (not shape.get("crossed") if module == "cocotb_endpoint_rate" else shape in EVERY)
]


@pytest.mark.deep
@pytest.mark.parametrize("module", COUNTS)
def test_gen3_x4(module):
    assert len(bench(module).tests) == COUNTS[module]


@pytest.mark.deep
@pytest.mark.parametrize(("module", "shape"), OTHERS)
def test_other_shapes(module, shape):
    some = shape not in EVERY or "crossed" in shape  # all take two to three times as long
    if module == "cocotb_endpoint" and some:
        assert len(bench(module, seed=2, testcase=",".join(ANY), **shape).tests) == len(ANY)
    else:
        assert len(bench(module, seed=2, **shape).tests) == COUNTS[module]


@pytest.mark.deep
def test_no_value_is_unknown_in_an_event_driven_simulator():
    needs_icarus()
    case = "any_length_and_alignment/mode=free"  # more would take minutes
    assert bench("cocotb_endpoint", testcase=case, icarus=True).tests == (case,)
