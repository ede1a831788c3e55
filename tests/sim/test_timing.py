# amaranth: UnusedElaboratable=no
"""Rows of clock rates, and what is read from a report of nextpnr."""

from pathlib import Path
from typing import Any

import pytest

from nearstep_hw.generate import GENERATORS
from nearstep_sim import place, timing


def _step(kind: str, delay: float, source: str, to: str) -> dict[str, Any]:
    return {"type": kind, "delay": delay, "from": {"cell": source}, "to": {"cell": to}}


REPORT = {
    "fmax": {"clk": {"achieved": 104.5, "constraint": 120.0}, "other": {"achieved": 300.0}},
    "utilization": {
        "TRELLIS_FF": {"used": 7, "available": 83640},
        "DCCA": {"used": 0, "available": 56},
    },
    "critical_paths": [
        {
            "from": "<async>",
            "to": "posedge clk",
            "path": [_step("routing", 99.0, "component.pin", "component.a_TRELLIS_FF_Q")],
        },
        {
            "from": "posedge clk",
            "to": "posedge clk",
            "path": [
                _step("clk-to-q", 0.5, "component.sum_9_TRELLIS_FF_Q", "component.z_LUT4_Z"),
                _step("routing", 1.5, "component.z_LUT4_Z", "$nextpnr_CCU2C_385$CCU2_COMB0"),
                _step("setup", 0.25, "$nextpnr_CCU2C_385$CCU2_COMB0", "component.$16_TRELLIS_FF_Q"),
            ],
        },
    ],
}


def test_a_report_gives_the_slowest_clock_and_the_path_by_names_of_the_source() -> None:
    placed = place.read_report(REPORT)
    assert placed.fmax_mhz == 104.5
    assert placed.cells == {"TRELLIS_FF": 7}
    assert placed.path_ns == 2.25
    assert list(placed.path) == ["sum_9", "z"]


def test_a_report_without_a_path_within_a_clock_is_refused() -> None:
    report = {**REPORT, "critical_paths": REPORT["critical_paths"][:1]}
    with pytest.raises(ValueError, match="must have a path within a clock, not 0"):
        place.read_report(report)


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        ("component.down_146_TRELLIS_FF_Q_1_DI_LUT4_Z", "down_146"),
        ("component.bank.o_rule_PFUMX_Z", "bank.o_rule"),
        ("top_98_ring.0.0$DPRAM_COMB1", "top_98_ring.0.0"),
        ("component.$1689_TRELLIS_FF_Q_LSR_LUT4_Z", ""),
    ],
)
def test_cells_have_the_names_of_their_signals(cell: str, name: str) -> None:
    assert place.source_name(cell) == name


def test_every_generator_has_a_block_or_a_reason() -> None:
    assert set(GENERATORS) == set(timing.BLOCKS) | set(timing.TOO_LARGE)
    assert set(timing.LARGE) <= set(timing.BLOCKS)
    assert set(timing.SMALLER) <= set(timing.BLOCKS)
    goals = {name for name, block in timing.BLOCKS.items() if block.least_mhz}
    assert {"adam_fu", "axpby_fu", "fp32_fma", "fp32_div"} <= goals
    assert len(timing.BLOCKS["adam_fu"].seeds) == 5


def test_a_slower_block_is_found() -> None:
    old = {"fmax_mhz": 110.0}
    allowed = 110.0 * (1 - timing.SLOWER)
    assert timing.compare("adam_fu", {"fmax_mhz": allowed + 0.1}, old) == []
    assert timing.compare("adam_fu", {"fmax_mhz": allowed - 0.1}, old) == [
        "102.2 MHz, 110.0 before"
    ]
    assert timing.compare("adam_fu", {"fmax_mhz": 99.0}, None) == [
        "99.0 MHz, at least 100 is asked for"
    ]
    assert timing.compare("dram_controller", {"fmax_mhz": 40.0}, None) == []


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "timing.json"
    assert timing.read(path) == ({}, {})
    row = {"digest": "0", "fmax_mhz": 120.5, "seeds": {"1": 120.5}, "lut": 9}
    timing.write({"fp32_mul": {**row, "reports": {"1": {}}}, "fp32_add": row}, path)
    tools, rows = timing.read(path)
    assert tools == timing.tools()
    assert list(rows) == ["fp32_add", "fp32_mul"]
    for name, found in rows.items():
        assert found == {"what": timing.BLOCKS[name].what, **row}


def test_rows_of_the_checkout_reach_their_goals() -> None:
    tools, rows = timing.read()
    wrong = {name: timing.compare(name, row, None) for name, row in rows.items()}
    print(f"{len(rows)} rows of {tools}")
    assert not any(wrong.values()), wrong
    assert set(rows) <= set(timing.BLOCKS)


@pytest.mark.deep
def test_a_small_unit_is_placed_and_is_the_same_twice() -> None:
    first, again = (timing.measure("fp32_to_bf16", (1,)) for _ in range(2))
    assert first == again
    assert first["fmax_mhz"] > timing.GOAL_MHZ
    assert first["seeds"] == {"1": first["fmax_mhz"]}
