"""Resources of a chip from the cells that Yosys names."""

import pytest

from nearstep_sim.synthesis import AREA, ultrascale_plus_area


def test_cells_become_resources() -> None:
    cells = {
        "DSP48E2": 12,
        "LUT2": 3,
        "LUT6": 4,
        "FDRE": 5,
        "FDSE": 6,
        "CARRY4": 9,
        "BUFG": 1,
        "RAM32M16": 2,
        "SRL16E": 3,
        "RAMB18E2": 5,
        "RAMB36E2": 1,
    }
    area = ultrascale_plus_area(cells)
    assert tuple(area) == AREA
    assert area == {"dsp": 12, "lut": 7, "lut_memory": 19, "ff": 11, "bram36": 3.5}


def test_a_memory_of_unknown_size_is_an_error() -> None:
    with pytest.raises(KeyError, match="RAM512X1S"):
        ultrascale_plus_area({"RAM512X1S": 1})
