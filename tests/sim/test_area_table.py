"""The table of areas: every row there is, sums of blocks, and what papers print."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import typer
from click.testing import Result
from typer.testing import CliRunner

from nearstep_sim import area
from nearstep_sim.area_table import CHIPS, PAPERS, PRODUCTS, Figures, Label, command, table
from nearstep_sim.row_file import read_rows


def invoke(arguments: Sequence[str]) -> Result:
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments, env={"COLUMNS": "200"})


def rows_of(label: Label, family: str) -> dict[str, Figures]:
    return {row.name: row for row in table() if (row.label, row.family) == (label, family)}


@pytest.mark.parametrize("family", area.FAMILIES.values(), ids=list(area.FAMILIES))
def test_every_row_of_a_file_is_in_the_table(family: area.Family) -> None:
    _, rows = read_rows(family.file)
    found = rows_of(Label.MEASURED, family.title)
    assert set(found) == set(rows)
    assert len(found) >= 10
    kib = {"bram36": 36, "bram18": 18}
    for name, row in rows.items():
        values = found[name].values
        assert all(values[key] == row[key] for key in ("lut", "ff", "dsp"))
        assert all(values["bram"] == row[key] * kib[key] for key in kib if key in row)


def test_a_product_is_the_sum_of_its_parts() -> None:
    _, rows = read_rows(area.FILE)
    found = rows_of(Label.MODELLED, "UltraScale+")
    assert set(found) == set(PRODUCTS)
    module = found["AXDIMM module"]
    assert module.values["dsp"] == rows["axdimm_module"]["dsp"] + 32 * rows["adam_fu"]["dsp"] == 384
    assert module.values["bram"] == rows["axdimm_module"]["bram36"] * 36
    assert module.source == "axdimm_module + 32 adam_fu"


def test_products_are_of_blocks_that_there_are() -> None:
    parts = {part for product in PRODUCTS.values() for part in product.parts}
    assert parts <= set(area.BLOCKS)
    # What a row leaves out is in the sum as often.
    rows = read_rows(area.FILE)[1]
    left_out = 0
    for product in PRODUCTS.values():
        for part, times in product.parts.items():
            for box, count in rows[part].get("without", {}).items():
                units = {box, "smartssd_fu"} & set(product.parts)
                assert sum(product.parts[unit] for unit in units) == count * times
                left_out += 1
    assert left_out >= 5


def test_shares_of_a_paper_become_numbers_of_its_chip() -> None:
    found = {row.name: row for row in table() if row.label is Label.PAPER}
    assert set(found) == {row.name for row in PAPERS}
    updater = found["SmartSSD updater, Adam"]
    assert updater.values == {"lut": 175_948, "dsp": 217, "bram": 9611, "uram": 44}
    assert updater.values["lut"] / CHIPS["KU15P"]["lut"] == pytest.approx(0.3366, abs=1e-5)
    assert found["AXDIMM functional unit"].values == {"dsp": 31}


def test_the_table_as_text_as_markdown_and_as_json() -> None:
    text, markdown, as_json = (invoke(each) for each in ([], ["--md"], ["--json"]))
    rows = json.loads(as_json.output)
    assert [row["name"] for row in rows] == [row.name for row in table()]
    assert {row["label"] for row in rows} == {"paper", "measured (Yosys)", "modelled"}
    lines = markdown.output.splitlines()
    assert len(lines) == len(rows) + 2
    assert len({line.count("|") for line in lines}) == 1
    assert "175,948 (33.66%)" in markdown.output
    for row in rows:
        assert row["name"] in text.output
    assert invoke(["--md", "--json"]).exit_code == 2


def test_without_a_checkout_there_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nowhere = area.Family(
        name="ecp5", title="ECP5", file=tmp_path / "none.json", cells=area.ECP5.cells,
        area=area.ECP5.area, columns=area.ECP5.columns,
    )  # fmt: skip
    monkeypatch.setattr(area, "FAMILIES", {"ecp5": nowhere})
    done = invoke([])
    assert done.exit_code == 2
    assert "this command is for a checkout" in done.output
