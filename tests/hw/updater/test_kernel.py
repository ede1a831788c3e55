"""Builds the Adam kernel and runs its cocotb benches."""

import json
from pathlib import Path

import pytest

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.unit_instance import UNIT_MODULE, UnitInstance
from nearstep_hw.updater.update_kernel import UpdateKernel
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.axi_memory import STALL_MODES
from nearstep_sim.bench.cocotb_runner import BenchResult, run_cocotb
from nearstep_sim.updater import stand_in
from nearstep_sim.updater.library import kernel_verilog
from nearstep_sim.updater.stand_in import StandInUnit
from nearstep_sim.verilate.build import verilog_of
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import update_rule

pytestmark = pytest.mark.cocotb

HERE = Path(__file__).parent
TOP = "adam_kernel"
UNITS = {"stand_in": StandInUnit, "adam": FunctionalUnit}
SMALL = {"lanes": 4, "functional_units": 2, "block_bytes": 256}


def bench(
    module: str,
    unit: str,
    options: dict[str, object],
    seed: int = 1,
    instances: bool = False,
    testcase: str | None = None,
) -> BenchResult:
    """Run the benches of `module`, or those of `testcase`, on a kernel with `unit`s, as `options`
    say.

    The units are part of the kernel, or `instances` of a module beside it.
    """
    config = UpdateKernelConfig(**options)
    source = Path(stand_in.__file__).read_text() if unit == "stand_in" else ""

    def generate() -> str:
        if not instances:
            return to_verilog(UpdateKernel(config, unit=UNITS[unit]), TOP)
        beside = {UNIT_MODULE: UNITS[unit](update_rule(config))}
        return to_verilog(UpdateKernel(config, unit=UnitInstance), TOP, beside)

    verilog = verilog_of(f"{TOP} {unit} {instances} {config!r} {source}", generate)
    result = run_cocotb(
        top=TOP,
        verilog=verilog,
        test_module=HERE / f"{module}.py",
        testcase=testcase,
        env={
            "NEARSTEP_CONFIG": json.dumps(options),
            "NEARSTEP_UNIT": unit,
            "NEARSTEP_SEED": str(seed),
        },
        seed=seed,
    )
    print(f"seed {seed}: {len(result.tests)} benches passed: {', '.join(result.tests)}")
    return result


@pytest.mark.deep
def test_runs_of_every_size_while_both_sides_stall():
    case = "every_size/mode=both,random_sizes_and_places"
    assert len(bench("cocotb_kernel_runs", "stand_in", SMALL, testcase=case).tests) == 2


@pytest.mark.deep
def test_runs_with_every_size_and_stall_mode():
    assert len(bench("cocotb_kernel_runs", "stand_in", SMALL).tests) == 8


@pytest.mark.deep
@pytest.mark.parametrize(
    "options",
    [
        {"lanes": 1, "block_bytes": 32},
        {"lanes": 1, "block_bytes": 2048},
        {"lanes": 2, "functional_units": 1, "block_bytes": 64, "windows": 8},
        {"lanes": 2, "functional_units": 1, "block_bytes": 64, "technology": "ecp5"},
        {"lanes": 4, "functional_units": 2, "block_bytes": 256, "technology": "ecp5"},
        {"lanes": 8, "functional_units": 1, "block_bytes": 1024, "bursts_ahead": 8},
        {"lanes": 16, "functional_units": 4, "block_bytes": 512, "address_width": 64},
        {"lanes": 16, "block_bytes": 1024, "address_width": 17},
        {"lanes": 16, "functional_units": 16, "block_bytes": 4096, "bursts_ahead": 9},
    ],
    ids=lambda options: "-".join(str(value) for value in options.values()),
)
def test_other_shapes(options):
    assert len(bench("cocotb_kernel_runs", "stand_in", options, seed=2).tests) == 8


@pytest.mark.deep
@pytest.mark.parametrize(
    ("unit", "options"),
    [
        ("adam", {"lanes": 4, "functional_units": 2, "block_bytes": 2048}),
        ("stand_in", {"lanes": 1, "block_bytes": 1024}),
        ("stand_in", {"lanes": 4, "functional_units": 1, "block_bytes": 1024, "windows": 8}),
        ("stand_in", {"lanes": 4, "block_bytes": 4096, "technology": "ecp5"}),
        ("stand_in", {"lanes": 16, "functional_units": 4, "block_bytes": 16384}),
        ("stand_in", {"lanes": 16, "block_bytes": 1024, "bursts_ahead": 9}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(map(str, value.values())),
)
def test_moments_in_8_bits(unit, options):
    options = {**options, "state_format": "dynamic8"}
    assert len(bench("cocotb_kernel_runs", unit, options, seed=3).tests) == 8


@pytest.mark.deep
@pytest.mark.parametrize("instances", [False, True])
def test_adam_units_give_the_bits_of_the_golden_rule(instances):
    options = {"lanes": 2, "block_bytes": 256}
    assert len(bench("cocotb_kernel_runs", "adam", options, instances=instances).tests) == 8


@pytest.mark.deep
def test_units_that_are_instances_of_a_module_give_the_same_bits():
    assert len(bench("cocotb_kernel_runs", "stand_in", SMALL, instances=True).tests) == 8


@pytest.mark.deep
def test_runs_on_a_memory_model_written_by_others():
    assert len(bench("cocotb_kernel_ram", "stand_in", SMALL).tests) == 4


@pytest.mark.deep
@pytest.mark.parametrize("order", ["default", "paper"])
def test_sixteen_adam_units_give_the_bits_of_the_golden_rule(order):
    options = {"lanes": 16, "block_bytes": 512, "order": order}
    assert len(bench("cocotb_kernel_runs", "adam", options).tests) == 8


@pytest.mark.deep
@pytest.mark.parametrize(
    ("module", "cases"),
    [("cocotb_kernel_runs", "every_size"), ("cocotb_kernel_ram", "runs")],
)
def test_the_shipped_kernel_gives_the_golden_bits_in_every_stall_mode(module: str, cases: str):
    """The Verilog of `nearstep rtl adam_kernel`, with its units."""
    result = run_cocotb(
        top=TOP,
        verilog=kernel_verilog(UpdateKernelConfig()),
        test_module=HERE / f"{module}.py",
        testcase=",".join(f"{cases}/mode={mode}" for mode in STALL_MODES),
        env={"NEARSTEP_CONFIG": "{}", "NEARSTEP_UNIT": "adam", "NEARSTEP_SEED": "3"},
        seed=3,
        blocks=[UNIT_MODULE],
    )
    print(f"seed 3: {result.tests}")
    assert len(result.tests) == len(STALL_MODES) == 4
