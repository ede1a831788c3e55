# amaranth: UnusedElaboratable=no
"""The functional unit of Adam under cocotb."""

from pathlib import Path

import pytest

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.cocotb_runner import run_cocotb
from nearstep_sim.verilate.build import verilog_of
from nearstep_spec.rule.adam import ADAM

SEED = 20


@pytest.mark.cocotb
@pytest.mark.deep
def test_unit_through_bubbles_stalls_and_reset() -> None:
    print(f"seed {SEED}")
    top = "adam_unit"
    key = f"{top} {FunctionalUnit(ADAM).key}"
    result = run_cocotb(
        top=top,
        verilog=verilog_of(key, lambda: to_verilog(FunctionalUnit(ADAM), top)),
        test_module=Path(__file__).parent / "cocotb_unit.py",
        env={"NEARSTEP_SEED": str(SEED)},
    )
    assert len(result.tests) == 9
