# amaranth: UnusedElaboratable=no
"""Rows of clock rates."""

from pathlib import Path

import pytest

from nearstep_hw.generate import GENERATORS
from nearstep_sim import timing
from nearstep_sim.row_file import read_rows


def test_every_generator_has_a_block_or_a_reason() -> None:
    assert set(GENERATORS) == set(timing.BLOCKS) | set(timing.WITHOUT_ROW)
    assert set(timing.LARGE) <= set(timing.BLOCKS)
    assert set(timing.SMALLER) <= set(timing.BLOCKS)
    goals = {name for name, block in timing.BLOCKS.items() if block.least_mhz}
    assert {"adam_fu", "axpby_fu", "fp32_fma", "fp32_div"} <= goals
    assert len(timing.BLOCKS["adam_fu"].seeds) == 5


def test_every_block_can_be_made() -> None:
    made = [block.make() for block in timing.BLOCKS.values()]
    assert len(made) == len(timing.BLOCKS) > 20


@pytest.mark.deep
def test_units_outside_of_a_block_are_part_of_what_is_placed() -> None:
    text = timing.BLOCKS["general_updater"].verilog("general_updater")
    assert "module general_updater(" in text
    assert "module general_fu(" in text
    assert len(timing.digest("general_updater").split("-")) == 2
    assert len(timing.digest("fp32_mul").split("-")) == 1


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
    assert read_rows(path) == ({}, {})
    row = {"digest": "0", "fmax_mhz": 120.5, "seeds": {"1": 120.5}, "lut": 9}
    timing.write({"fp32_mul": {**row, "reports": {"1": {}}}, "fp32_add": row}, path)
    tools, rows = read_rows(path)
    assert tools == timing.tools()
    assert list(rows) == ["fp32_add", "fp32_mul"]
    for name, found in rows.items():
        assert found == {"what": timing.BLOCKS[name].what, **row}


def test_rows_of_the_checkout_reach_their_goals() -> None:
    tools, rows = read_rows(timing.FILE)
    wrong = {name: timing.compare(name, row, None) for name, row in rows.items()}
    print(f"{len(rows)} rows of {tools}")
    assert len(rows) > 0
    assert not any(wrong.values()), wrong
    assert set(rows) <= set(timing.BLOCKS)


@pytest.mark.deep
def test_a_small_unit_is_placed_and_is_the_same_twice() -> None:
    first, again = (timing.measure("fp32_to_bf16", (1,)) for _ in range(2))
    assert first == again
    row = read_rows(timing.FILE)[1]["fp32_to_bf16"]
    assert first["seeds"] == {"1": first["fmax_mhz"]} == {"1": row["seeds"]["1"]}
    assert first["reports"]["1"]["path"]["stretches"]
