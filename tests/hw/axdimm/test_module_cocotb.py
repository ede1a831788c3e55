"""Builds the tops of the AXDIMM family as they are shipped, and runs their cocotb benches."""

import json
from pathlib import Path

import pytest

from nearstep_hw.generate import verilog
from nearstep_hw.updater.unit_instance import UNIT_MODULE
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.verilate.build import verilog_of
from nearstep_spec.axdimm.config import DimmConfig
from nearstep_spec.codec import digest
from nearstep_spec.updater.config import UpdateKernelConfig

pytestmark = [pytest.mark.cocotb, pytest.mark.deep]

HERE = Path(__file__).parent
TOP = "axdimm_module"


@pytest.mark.parametrize("units", [16, 4])
@pytest.mark.parametrize(("top", "dfi"), [(TOP, ["dfi0", "dfi1"]), ("axdimm_channel", ["dfi"])])
def test_a_shipped_top_gives_the_golden_bits(top: str, dfi: list[str], units: int) -> None:
    """The Verilog of `nearstep rtl`, with every unit of every channel."""
    kernel = {"functional_units": units}
    dimm = DimmConfig(kernel=UpdateKernelConfig(**kernel))
    text = verilog_of(f"{top} {digest(dimm)}", lambda: verilog(top, config=dimm))
    result = run_cocotb(
        top=top,
        verilog=text,
        test_module=HERE / "cocotb_shipped.py",
        env={"NEARSTEP_CONFIG": json.dumps(kernel), "NEARSTEP_DFI": json.dumps(dfi)},
        seed=1,
        blocks=[UNIT_MODULE],
    )
    print(f"{top}, {units} units, seed 1: {result.tests}")
    assert len(result.tests) == 4
