"""Area of the functional unit of Adam after synthesis."""

import pytest

from nearstep_hw.rule.adam import ADAM
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.verilog import to_verilog
from nearstep_sim.synthesis import ultrascale_plus_cells


@pytest.mark.deep
def test_adam_unit_needs_at_most_twelve_multipliers_and_eighty_cycles() -> None:
    unit = FunctionalUnit(ADAM)
    cells = ultrascale_plus_cells(to_verilog(unit, "unit"), "unit")
    print(f"latency {unit.latency}, {cells}")
    assert unit.latency <= 80
    assert 0 < cells["DSP48E2"] <= 12
    assert "RAMB18E2" not in cells
    assert "RAMB36E2" not in cells
