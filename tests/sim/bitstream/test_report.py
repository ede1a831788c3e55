"""What is read from a report of nextpnr, and what is told of it."""

import pytest

from nearstep_sim.bitstream.errors import BitstreamError
from nearstep_sim.bitstream.report import (
    LUT,
    Stretch,
    Use,
    read_report,
    utilisation,
    without_kept,
)
from nearstep_sim.bitstream.sources import block_of, source_of

from .fake_tools import raw_report


def test_clocks_come_with_what_they_must_reach_the_slowest_first() -> None:
    report = read_report(raw_report(120.0))
    assert [(each.name, each.achieved, each.needed, each.met) for each in report.clocks] == [
        ("clk", 120.0, 100.0, True),
        ("link", 200.0, 12.0, True),
    ]
    assert report.margin == 1.2
    assert report.failed == {}
    assert read_report(raw_report(99.99)).failed == {"clk": (99.99, 100.0)}
    assert read_report(raw_report(100.0)).failed == {}


def test_cells_come_with_how_many_there_are() -> None:
    report = read_report(raw_report(120.0, used={"DP16KD": 7}))
    assert report.cells["DP16KD"] == Use(7, 208)


def test_lookup_tables_that_are_kept_free_are_neither_in_use_nor_there() -> None:
    cells = {LUT: Use(50, 200), "TRELLIS_FF": Use(50, 200)}
    assert without_kept(cells, 30) == {LUT: Use(20, 170), "TRELLIS_FF": Use(50, 200)}
    assert without_kept(cells, 0) == cells == {LUT: Use(50, 200), "TRELLIS_FF": Use(50, 200)}
    assert without_kept({"TRELLIS_FF": Use(50, 200)}, 30) == {"TRELLIS_FF": Use(50, 200)}


def test_the_critical_path_is_the_longest_of_the_slowest_clock_by_source_and_block() -> None:
    path = read_report(raw_report(120.0), {"b_FF": "nearstep_hw/boards/top.py:3"}).path
    assert path is not None
    assert (path.start, path.end) == ("unit.a_FF", "b_FF")
    assert (path.logic_ns, path.routing_ns) == (0.75, 3.0)
    assert path.places == ((3, 4), (5, 4))
    add = "nearstep_hw/fp/add.py:7"
    assert path.stretches == (
        Stretch("", "unit", "", 1, 0.5, 0.0),
        Stretch(add, "unit", "unit.a", 2, 0.25, 1.0),
        Stretch("", "", "b_DI", 1, 0.0, 2.0),
        Stretch("nearstep_hw/boards/top.py:3", "", "", 1, 0.0, 0.0),
    )


def test_a_report_without_clocks_says_nothing_about_timing() -> None:
    with pytest.raises(BitstreamError, match="reports no clock"):
        read_report({**raw_report(1.0), "fmax": {}})
    without = {**raw_report(120.0), "critical_paths": []}
    assert read_report(without).path is None


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Info: \t              DP16KD:     212/    208   101%", ("DP16KD", Use(212, 208))),
        (
            "Info: \t        TRELLIS_COMB:    2645/  83640     3%",
            ("TRELLIS_COMB", Use(2645, 83640)),
        ),
        ("Info:     Total LUT4s:      2531/83640     3%", None),
        ("Info: Packing carries...", None),
    ],
)
def test_lines_of_the_utilisation_are_read(line: str, expected: object) -> None:
    assert utilisation(line) == expected


@pytest.mark.parametrize(
    ("name", "blocks"),
    [
        ("led_FF", ()),
        ("card.kernel.unit0.x_FF_Q_12", ("card", "kernel", "unit0")),
        ("$glbnet$pll.feedback", ("pll",)),
        (r"$flatten\card.\kernel.$auto$memory.cc:1$5", ("card", "kernel")),
        ("$PACKER_VCC_NET", ()),
        ("$abc$1.$auto$2", ()),
    ],
)
def test_blocks_of_names_in_a_flat_netlist(name: str, blocks: tuple[str, ...]) -> None:
    assert block_of(name) == blocks


def test_a_source_is_one_of_the_design() -> None:
    ours = "nearstep_hw/fp/round.py:52"
    foreign = ["/share/lattice/cells_map.v:1.2-3", "amaranth/lib/wiring.py:171"]
    assert source_of([*foreign, f"{foreign[0]}|{ours}"]) == ours
    assert source_of(foreign) == source_of([]) == ""
