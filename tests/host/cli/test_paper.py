"""`nearstep paper`."""

import csv
import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nearstep.cli import paper_smart_infinity
from nearstep.cli.paper import app

RUNNER = CliRunner()


def test_a_row_is_printed_with_its_errors_and_assumptions(tmp_path: Path) -> None:
    path = tmp_path / "new" / "rows.json"
    trace, image = tmp_path / "trace" / "large.json", tmp_path / "large.png"
    arguments = ["axdimm", "--models", "gpt3-large", "--no-kernel", "--output", str(path)]
    arguments += ["--trace", str(trace), "--picture", str(image)]
    result = RUNNER.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert "section 5.2" in result.output
    written = json.loads(path.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"]) == 16 + 3 + 7 + 9
    assert f"{rows['gpt3-large: speedup, total']['error']:+.1%}" in result.output
    assert rows["AXDIMM, 32Gb: achieved"]["found"] is None
    assert "omit --no-kernel" in result.output
    assert written["table_5"] == []
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    names = [event["name"] for event in events]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    shown = written["table_6"]["gpt3-large"]["axdimm"]  # the iteration of the table
    assert max(ends) / 1e6 == pytest.approx(shown["forward_s"] + shown["backward_s"], rel=1e-9)
    assert sum(name.startswith("update") for name in names) > 100
    assert image.read_bytes()[1:4] == b"PNG"
    assert rows["gpt3-large, baseline: backward"]["paper"] == 8.01
    assert written["inputs"][0]["label"] == "fitted"
    for option in ("--rtl-updates", "--rtl-transfers"):
        refused = RUNNER.invoke(app, [*arguments, option])
        assert refused.exit_code == 2
        assert "omit --no-kernel" in refused.output


def test_greedy_plans_of_a_model_are_beside_the_exact_one(tmp_path: Path) -> None:
    path = tmp_path / "memferry.json"
    arguments = ["memferry", "--models", "bert-base", "--no-rows", "--no-sensitivity"]
    result = RUNNER.invoke(app, [*arguments, "--output", str(path)])
    assert result.exit_code == 0, result.output
    (model,) = json.loads(path.read_text(encoding="utf-8"))["greedy"]
    assert model["gap"] == 0
    assert len(model["greedy"]) == 8
    assert min(model["greedy"].values()) > 0
    assert f"{model['greedy']['whole-load, line-21, as-printed']:.2%}" in result.output


def test_rows_are_given_as_csv_and_as_bars(tmp_path: Path) -> None:
    """The same as in JSON, to the last digit."""
    table, image = tmp_path / "rows.csv", tmp_path / "bars.svg"
    arguments = ["coarse", "--no-timeline", "--no-sensitivity", "--only", "figure-2,figure-17"]
    result = RUNNER.invoke(app, [*arguments, "--csv", "-o", str(table), "--bars", str(image)])
    assert result.exit_code == 0, result.output
    assert result.output == table.read_text(encoding="utf-8")
    rows = [*csv.DictReader(io.StringIO(result.output))]
    printed = RUNNER.invoke(app, [*arguments, "--json"])
    beside = json.loads(printed.output)["rows"]
    assert len(rows) == len(beside) > 5
    for row, other in zip(rows, beside, strict=True):
        assert row == {name: "" if value is None else str(value) for name, value in other.items()}
    drawn = image.read_text(encoding="utf-8")
    assert "<svg" in drawn
    assert all(f"{row['name']} ({row['section']})" in drawn for row in rows)
    assert RUNNER.invoke(app, [*arguments, "--csv", "--json"]).exit_code == 2


def test_rows_of_coarse_are_beside_what_each_assumption_decides(tmp_path: Path) -> None:
    path = tmp_path / "coarse.json"
    arguments = ["coarse", "--no-timeline", "--only", "figure-2,figure-8,figure-16"]
    result = RUNNER.invoke(app, [*arguments, "--output", str(path)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    written = json.loads(path.read_text(encoding="utf-8"))
    assert (written["errors"]["all"]["count"], written["errors"]["apart"]["count"]) == (10, 3)
    assert f"{written['errors']['all']['mean']:.1%}" in result.output
    assert [each["label"] for each in written["inputs"]] == [
        "fitted",
        *["paper"] * 3,
        *["chosen"] * 4,
    ]
    assert written["inputs"][0]["value"] in result.output
    assert len(written["rows"]) == 22
    for row in written["rows"]:
        assert row["name"] in result.output
    assert len(written["sensitivity"]) == 13
    assert written["dual"] == written["pipeline"] == written["scale"] == []


def test_parts_of_smart_infinity_are_printed_kept_and_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, image = tmp_path / "rows.json", tmp_path / "figures.svg"
    drawn = []
    monkeypatch.setattr(paper_smart_infinity, "draw", lambda _, path: drawn.append(path))
    arguments = ["smart-infinity", "--only", "table-1"]
    arguments += ["--bench", str(tmp_path), "--output", str(path), "--picture", str(image)]
    result = RUNNER.invoke(app, arguments, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    assert "80 % of an iteration" in result.output
    assert "SmartComp, 2 %: gradients written: padding to 4 KiB" in result.output
    assert "bench_smartssd_area.py` makes it" in result.output
    assert "Table IV, accuracy of fine-tuning" in result.output
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["errors"] == {"all": None, "apart": None}
    assert written["sensitivity"] == []
    (gpu,) = [each for each in written["inputs"] if each["name"] == "GPU, of its peak"]
    assert 40 < float(gpu["value"].strip("%")) < 60
    rows = {row["name"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"]) == 33
    assert rows["ZeRO-Inf: states read"]["found"] == 6.0
    assert drawn == [image]
