"""The timing table against numbers typed from JESD79-4."""

import pytest

from nearstep_spec.dram.timing import (
    PARTS,
    RANK_SWITCH,
    SPEED_GRADES,
    Minimum,
    TimingError,
    dram_timing,
)

# JESD79-4, DDR4-1600K (11-11-11), tCK 1.25 ns. Clocks worked out by hand from the standard's rows.
COMMON_1600 = {
    "CL": 11,  # tAA 13.75 ns
    "CWL": 9,  # MR2, first set at 1600
    "BL": 8,
    "tRCD": 11,  # 13.75 ns
    "tRP": 11,  # 13.75 ns
    "tRAS": 28,  # 35 ns
    "tRC": 39,  # 48.75 ns
    "tCCD_S": 4,  # 4 nCK
    "tCCD_L": 5,  # max(5 nCK, 6.25 ns)
    "tWR": 12,  # 15 ns
    "tWTR_S": 2,  # max(2 nCK, 2.5 ns)
    "tWTR_L": 6,  # max(4 nCK, 7.5 ns)
    "tRTP": 6,  # max(4 nCK, 7.5 ns)
    "tMRD": 8,  # 8 nCK
    "tMOD": 24,  # max(24 nCK, 15 ns)
    "tZQCS": 128,
    "tZQoper": 512,
    "tREFI": 6240,  # 7.8 us
}
BY_PAGE_1600 = {
    "x8": {"tRRD_S": 4, "tRRD_L": 5, "tFAW": 20},  # 1 KiB page: 5 ns, 6 ns, max(20 nCK, 25 ns)
    "x16": {"tRRD_S": 5, "tRRD_L": 6, "tFAW": 28},  # 2 KiB page: 6 ns, 7.5 ns, max(28 nCK, 35 ns)
}
TRFC_1600 = {"4Gb": 208, "8Gb": 280, "16Gb": 440, "32Gb": 440}  # 260, 350, 550 ns
BOUND = {"4Gb": 0.9667, "8Gb": 0.9551, "16Gb": 0.9295, "32Gb": 0.9295}  # 1 - 350 / 7800 and so on


@pytest.mark.parametrize(("density", "width"), PARTS)
def test_ddr4_1600_has_the_clocks_of_the_standard(density: str, width: str) -> None:
    page = "x8" if density == "32Gb" else width  # two dies of x8
    expected = {**COMMON_1600, **BY_PAGE_1600[page], "tRFC": TRFC_1600[density]}
    timing = dram_timing("DDR4-1600", density, width)
    assert timing.table == expected
    assert len(expected) == 22
    assert timing.refresh_bound == pytest.approx(BOUND[density], abs=5e-5)


def test_the_host_clock_keeps_the_nanoseconds() -> None:
    # By hand at 2.5 ns: 5.5 -> 6, 14, 19.5 -> 20, 6, and the nCK minima stay.
    rows = "CL 6 CWL 5 BL 8 tRCD 6 tRP 6 tRAS 14 tRC 20 tCCD_S 4 tCCD_L 5 tRRD_S 4 tRRD_L 4"
    rows += " tFAW 20 tWR 6 tWTR_S 2 tWTR_L 4 tRTP 4 tMRD 8 tMOD 24"
    rows += " tZQCS 128 tZQoper 512 tRFC 140 tREFI 3120"
    names, clocks = rows.split()[::2], map(int, rows.split()[1::2])
    assert dram_timing("DDR4-800", "8Gb", "x8").table == dict(zip(names, clocks, strict=True))


def test_what_the_host_keeps_holds_on_the_faster_dram() -> None:
    checks = 0
    for density, width in PARTS:
        host = dram_timing("DDR4-800", density, width).table
        dram = dram_timing("DDR4-1600", density, width).table
        for name in set(host) - {"CL", "CWL", "BL", "tREFI"}:
            assert 2 * host[name] >= dram[name], (name, density, width)
            checks += 1
        assert 2 * host["tREFI"] == dram["tREFI"]
    assert checks == 7 * 18


def test_a_package_of_32gb_is_two_dies_of_16gb_side_by_side() -> None:
    package, die = (dram_timing("DDR4-1600", *part) for part in (("32Gb", "x16"), ("16Gb", "x8")))
    assert package.table == die.table
    assert package != die
    with pytest.raises(TimingError, match=r"width of 32Gb must be one of \('x16',\), not 'x8'"):
        dram_timing("DDR4-1600", "32Gb", "x8")


def test_turnarounds_are_those_of_the_standard_for_1600k() -> None:
    timing = dram_timing("DDR4-1600", "8Gb", "x8")
    assert timing.read_to_write == 11 + 4 + 2 - 9  # CL + BL/2 + 2 - CWL = 8
    assert timing.write_to_read_s == 9 + 4 + 2  # CWL + BL/2 + tWTR_S = 15
    assert timing.write_to_read_l == 9 + 4 + 6  # 19
    assert timing.write_to_precharge == 9 + 4 + 12  # CWL + BL/2 + tWR = 25
    assert timing.max_refresh_interval == 9 * 6240


def test_data_of_two_ranks_are_two_clocks_apart_for_1600k() -> None:
    timing = dram_timing("DDR4-1600", "8Gb", "x8")
    assert RANK_SWITCH == 2
    assert timing.column_to_column_other_rank == 4 + 2
    assert timing.read_to_write_other_rank == 11 + 4 + 2 - 9
    assert timing.write_to_read_other_rank == 9 + 4 + 2 - 11
    assert dram_timing(cl=30).write_to_read_other_rank == 1  # a command a clock


@pytest.mark.parametrize(
    ("ps", "tck", "clocks"),
    [
        (13_750, 1250, 11),  # exact
        (6_000, 1250, 5),  # 4.8
        (7_500, 1250, 6),
        (13_320, 833, 16),  # 15.99: a whole number of clocks as the standard means it
        (13_750, 1071, 13),  # 12.838 -> 13
        (15_000, 1071, 14),  # 14.0056: the 2.5 % guard of the JEDEC algorithm forgives it
        (15_030, 1071, 15),  # 14.0336: beyond the guard
    ],
)
def test_rounding_is_the_jedec_algorithm(ps: int, tck: int, clocks: int) -> None:
    assert Minimum(ps=ps).clocks(tck) == clocks


def test_the_floor_in_clocks_wins_at_slow_clocks() -> None:
    assert Minimum(ps=5_000, nck=4).clocks(2500) == 4


def test_the_arithmetic_of_every_parameter_can_be_read() -> None:
    timing = dram_timing("DDR4-1600", "16Gb", "x8")
    assert timing.arithmetic["tRFC"] == "550 ns / 1.25 ns = 440 up = 440 nCK"
    assert timing.arithmetic["tRRD_L"] == "max(4 nCK, 6 ns / 1.25 ns = 4.8 up) = 5 nCK"
    assert timing.arithmetic["tREFI"] == "7800 ns / 1.25 ns = 6240 down = 6240 nCK"
    assert set(timing.arithmetic) == set(timing.table) - {"CL", "CWL", "BL"}
    for name, text in timing.arithmetic.items():
        assert text.endswith(f"= {timing.table[name]} nCK"), name


def test_a_module_may_show_longer_latencies() -> None:
    timing = dram_timing("DDR4-800", cl=20, cwl=6)
    assert (timing.cl, timing.cwl, timing.read_to_write) == (20, 6, 20)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ({"speed": "DDR4-3200"}, "speed"),
        ({"density": "2Gb"}, "density"),
        ({"width": "x4"}, "width"),
        ({"cl": 8, "cwl": 9}, "CWL <= CL"),
        ({"cwl": 0}, "CWL"),
    ],
)
def test_what_is_not_in_the_table_is_refused(arguments: dict, word: str) -> None:
    with pytest.raises(TimingError, match=word):
        dram_timing(**arguments)


def test_grades_are_named_by_their_data_rate() -> None:
    for name, grade in SPEED_GRADES.items():
        assert int(name.removeprefix("DDR4-")) * grade.tck_ps == 2_000_000
