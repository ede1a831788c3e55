# amaranth: UnusedElaboratable=no
"""Blocks after synthesis for ECP5, with models of the cells, are what they were before it."""

import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest

from nearstep_hw.axi.reader import ReadMover
from nearstep_hw.axi.schedule import BlockSchedule
from nearstep_hw.axi.writer import WriteMover
from nearstep_hw.fp.unit import OPERATIONS
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.stream.fifo import StreamFifo
from nearstep_hw.updater.update_kernel import UpdateKernel
from nearstep_hw.verilog import flat_ports, to_verilog
from nearstep_sim.bench import patterns
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.bench.fp_bank import Variant
from nearstep_sim.bench.functional_unit import VerilatedUnit
from nearstep_sim.bench.operands import operands, registers
from nearstep_sim.bench.twin import TwinError, run_twins
from nearstep_sim.bench.vectors import check
from nearstep_sim.flat_netlist import flat_ecp5_netlist
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.netlist import NetlistError, cells_of, ecp5_netlist, models
from nearstep_sim.verilate.build import verilog_of
from nearstep_spec.rule.adam import ADAM
from nearstep_spec.updater.config import UpdateKernelConfig

from ..hw.csr.sample import AxiLiteBlock, sample_map
from .every_cell import WIDTHS, EveryCell

TESTS = Path(__file__).resolve().parents[1]


def write(folder, top, text):
    path = folder / f"{top}.v"
    path.write_text(text)
    return path


def twins(folder, component, top, *, cycles, seed=1, change=lambda text: text):
    """Run a component beside its netlist, changed by `change`; what was compared, and the cells."""
    verilog = write(folder, top, to_verilog(component, top))
    netlist = ecp5_netlist(verilog, top).read_text()
    cells = cells_of(netlist)
    changed = write(folder, f"{top}_netlist", change(netlist))
    print(f"{top}: {cells}, seed {seed}")
    run = run_twins(top, verilog, changed, flat_ports(component), cycles=cycles, seed=seed)
    print(run)
    return run, cells


@pytest.mark.deep
def test_a_fifo_after_synthesis_is_the_fifo(tmp_path):
    run, cells = twins(tmp_path, StreamFifo(16, depth=16), "fifo", cycles=20_000)
    assert {"LUT4", "TRELLIS_FF", "TRELLIS_DPR16X4"} <= cells.keys()
    assert run.changed == 3
    assert run.compared == 2 * 3 * 20_000


@pytest.mark.deep
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_products_and_memories_of_every_width(tmp_path, seed):
    component = EveryCell()
    run, cells = twins(tmp_path, component, "every_cell", cycles=100_000, seed=seed)
    assert cells["DP16KD"] == len(WIDTHS)
    assert cells["MULT18X18D"] == 3
    assert cells["TRELLIS_DPR16X4"] == 2
    assert run.changed == 4 + len(WIDTHS)
    assert run.compared == 2 * run.changed * 100_000


@pytest.mark.deep
@pytest.mark.parametrize(
    ("pattern", "other", "port"),
    [
        (r"\.SIGNEDA\(1'h1\)", ".SIGNEDA(1'h0)", "o_(signed|mixed)"),
        (r"(\.INITVAL_\w+\(320'h)\w{6}", r"\g<1>555555", "o_(bits|words)"),
        (r"(TRELLIS_DPR16X4 #\(\s*\.INITVAL\(64'h)\w", r"\g<1>0", "o_small"),
        (r'\.REGSET\("RESET"\)', '.REGSET("SET")', "o_.*"),
    ],
)
def test_a_netlist_with_a_fault_is_found(tmp_path, pattern, other, port):
    def change(text):
        changed, count = re.subn(pattern, other, text)
        assert count
        return changed

    with pytest.raises(TwinError) as caught:
        twins(tmp_path, EveryCell(("bits", "words")), "every_cell", cycles=100_000, change=change)
    print(caught.value)
    assert re.fullmatch(port, caught.value.port)
    assert caught.value.expected != caught.value.actual


MOVER = {
    "streams": 4,  # random IDs are all of a stream: what others read is left open
    "address_width": 24,
    "beat_bytes": 8,
    "burst_beats": 16,
    "bursts_ahead": 4,
}
BLOCKS = {
    "fifo_of_block_ram": lambda: StreamFifo(36, depth=512),
    "axi_lite_bank": lambda: AxiLiteBlock(sample_map()),
    "schedule": lambda: BlockSchedule(
        streams=4, address_width=24, beat_bytes=8, block_beats=32, burst_beats=16, optional=True
    ),
    "read_mover": lambda: ReadMover(**MOVER, landing_beats=64),
    "write_mover": lambda: WriteMover(**MOVER, buffer_beats=64),
}


@pytest.mark.deep
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_after_synthesis_are_the_blocks(tmp_path, name):
    component = BLOCKS[name]()
    run, _ = twins(tmp_path, component, name, cycles=300_000)
    outputs = [port for port, way, _ in flat_ports(component) if way == "output"]
    assert run.changed >= len(outputs) - 2  # size and kind of a burst are constant
    assert run.compared == 2 * len(outputs) * run.cycles


@pytest.mark.deep
def test_every_unit_after_synthesis_gives_the_bits_of_the_golden_model():
    bank = [Variant(operation) for operation in OPERATIONS.values()]
    rng = np.random.default_rng(1)
    vectors = []
    for variant in bank:
        operation = variant.operation
        special = patterns.crossed(operation.source, operation.operands, rng, 20_000)
        seed = zlib.crc32(operation.name.encode())
        print(f"{operation.name}: seed {seed}")
        other = patterns.vectors(operation, 80_000, seed)
        vectors.append([np.concatenate(each) for each in zip(special, other, strict=True)])
    counts = check(bank, vectors, stall_seed=7, synthesis=ecp5_netlist)
    print(dict(zip(OPERATIONS, counts, strict=True)))
    assert min(counts) >= 80_000


@pytest.mark.deep
def test_adam_after_synthesis_gives_the_bits_of_the_golden_rule():
    unit = VerilatedUnit(FunctionalUnit(ADAM), synthesis=flat_ecp5_netlist, cxxflags=["-O1"])
    checked = 0
    try:
        for seed, stall in ((1, 0.0), (2, 0.3)):
            count = 20_011
            arrays = operands(ADAM.arrays_in, count, seed)
            scalars = registers(dict(ADAM.registers()), seed)
            expected = evaluate(ADAM, arrays, scalars)
            run = unit.run(arrays, scalars, stall=stall, bubble=stall, seed=seed)
            assert (run.missing, run.extra, run.changes_while_idle) == (0, 0, 0)
            for name in ADAM.arrays_out:
                bits = expected[name].view(np.uint32)
                np.testing.assert_array_equal(run.arrays[name].view(np.uint32), bits, name)
                checked += count
    finally:
        unit.close()
    print(f"{checked} results")
    assert checked == 2 * 3 * 20_011


KERNEL = {"lanes": 2, "functional_units": 1, "block_bytes": 256}


@pytest.fixture(scope="module")
def kernel():
    """The netlist of a whole kernel with its unit: minutes."""
    config = UpdateKernelConfig(**KERNEL)
    verilog = verilog_of(
        f"adam_kernel adam {config!r} ",
        lambda: to_verilog(UpdateKernel(config, unit=FunctionalUnit), "adam_kernel"),
    )
    print(cells_of(ecp5_netlist(verilog, "adam_kernel").read_text()))
    return flat_ecp5_netlist(verilog, "adam_kernel")


def bench(kernel, module, **environment):
    return run_cocotb(
        top="adam_kernel",
        verilog=kernel,
        test_module=TESTS / module,
        env={"NEARSTEP_CONFIG": json.dumps(KERNEL), **environment},
        seed=1,
    )


@pytest.mark.deep
@pytest.mark.cocotb
def test_the_kernel_after_synthesis_passes_the_benches_of_the_updater(kernel):
    unit = {"NEARSTEP_UNIT": "adam", "NEARSTEP_SEED": "1"}
    assert len(bench(kernel, "hw/updater/cocotb_kernel_runs.py", **unit).tests) == 8


@pytest.mark.deep
@pytest.mark.cocotb
def test_steps_of_the_driver_on_the_netlist_give_the_bits_of_the_golden_rule(kernel):
    assert len(bench(kernel, "system/cocotb_driver.py", NEARSTEP_COUNT="301").tests) == 2


def test_a_cell_without_a_model_is_named():
    with pytest.raises(NetlistError, match=r"^block: no model of DCCA, EHXPLLL; there are CCU2C,"):
        models("block", {"LUT4", "EHXPLLL", "DCCA"})


def test_models_bring_what_they_are_made_of():
    text = models("block", {"CCU2C": 3})
    assert re.findall(r"^module (\w+)", text, re.M) == ["CCU2C", "LUT2", "LUT4"]
    assert "specify" not in text
