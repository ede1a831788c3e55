"""Distances in fabric cycles against the clocks between the phases."""

import pytest

from nearstep_hw.dram.dfi import ACTIVATE_PHASE, COLUMN_PHASE, PHASES, PRECHARGE_PHASE
from nearstep_hw.dram.fabric import REFRESH_PHASE, FabricTiming
from nearstep_spec.dram.timing import PARTS, dram_timing

# (distance, phases of the two commands, clocks)
RULES = (
    ("activate_to_column", ACTIVATE_PHASE, COLUMN_PHASE, "t_rcd"),
    ("activate_to_precharge", ACTIVATE_PHASE, PRECHARGE_PHASE, "t_ras"),
    ("activate_to_activate", ACTIVATE_PHASE, ACTIVATE_PHASE, "t_rrd_s"),
    ("activate_to_activate_same_group", ACTIVATE_PHASE, ACTIVATE_PHASE, "t_rrd_l"),
    ("four_activates", ACTIVATE_PHASE, ACTIVATE_PHASE, "t_faw"),
    ("precharge_to_activate", PRECHARGE_PHASE, ACTIVATE_PHASE, "t_rp"),
    ("precharge_to_refresh", PRECHARGE_PHASE, REFRESH_PHASE, "t_rp"),
    ("read_to_precharge", COLUMN_PHASE, PRECHARGE_PHASE, "t_rtp"),
    ("write_to_precharge", COLUMN_PHASE, PRECHARGE_PHASE, "write_to_precharge"),
    ("column_to_column_same_group", COLUMN_PHASE, COLUMN_PHASE, "t_ccd_l"),
    ("read_to_write", COLUMN_PHASE, COLUMN_PHASE, "read_to_write"),
    ("write_to_read", COLUMN_PHASE, COLUMN_PHASE, "write_to_read_s"),
    ("write_to_read_same_group", COLUMN_PHASE, COLUMN_PHASE, "write_to_read_l"),
    ("column_to_column_other_rank", COLUMN_PHASE, COLUMN_PHASE, "column_to_column_other_rank"),
    ("read_to_write_other_rank", COLUMN_PHASE, COLUMN_PHASE, "read_to_write_other_rank"),
    ("write_to_read_other_rank", COLUMN_PHASE, COLUMN_PHASE, "write_to_read_other_rank"),
    ("refresh_cycle", REFRESH_PHASE, ACTIVATE_PHASE, "t_rfc"),
    ("calibration", REFRESH_PHASE, ACTIVATE_PHASE, "t_zqcs"),
    ("long_calibration", REFRESH_PHASE, ACTIVATE_PHASE, "t_zqoper"),
)


@pytest.mark.parametrize(("density", "width"), PARTS)
def test_every_distance_is_the_least_that_keeps_the_minimum(density: str, width: str) -> None:
    timing = dram_timing("DDR4-1600", density, width)
    fabric = FabricTiming(timing)
    for name, first, second, clocks in RULES:
        least = getattr(timing, clocks)
        found = getattr(fabric, name)
        between = [PHASES * cycles + second - first for cycles in (found - 1, found)]
        assert between[1] >= least, name
        if name != "activate_to_precharge":  # which tRC may lengthen
            assert between[0] < least, name
    assert len(RULES) == 19


@pytest.mark.parametrize(("density", "width"), PARTS)
def test_row_cycle_follows_from_its_two_parts(density: str, width: str) -> None:
    timing = dram_timing("DDR4-1600", density, width)
    fabric = FabricTiming(timing)
    cycle = fabric.activate_to_precharge + fabric.precharge_to_activate
    assert PHASES * cycle >= timing.t_rc


def test_ddr4_1600_by_hand() -> None:
    fabric = FabricTiming(dram_timing("DDR4-1600", "8Gb", "x8"))
    assert fabric.column_to_column_same_group == 2  # 5 nCK become 8
    assert fabric.activate_to_column == 3  # 11 nCK from phase 1 to phase 0
    assert fabric.precharge_to_activate == 3  # 11 nCK from phase 2 to phase 1
    assert fabric.write_to_precharge == 6  # 25 nCK, from phase 0 to phase 2: 26
    assert fabric.read_to_write == 2  # 8 nCK
    assert (fabric.write_to_read, fabric.write_to_read_same_group) == (4, 5)  # 15, 19 nCK
    assert fabric.column_to_column_other_rank == 2  # 4 + 2 nCK
    assert fabric.read_to_write_other_rank == 2  # 11 + 4 + 2 - 9 = 8 nCK
    assert fabric.write_to_read_other_rank == 1  # 9 + 4 + 2 - 11 = 4 nCK
    assert fabric.refresh_cycle == 70  # 280 nCK
    assert fabric.refresh_interval == 1560
    assert (fabric.calibration, fabric.long_calibration) == (32, 128)  # 128, 512 nCK
    assert fabric.calibration_interval == 25_600_000  # 128 ms / 5 ns
