"""`nearstep paper smart-infinity`."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nearstep.cli import paper_smart_infinity
from nearstep.cli.paper import app

RUNNER = CliRunner()


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
    assert "SmartComp, 2 %: padding to 4 KiB" in result.output
    assert "bench_smartssd_area.py` makes it" in result.output
    assert "Table IV, accuracy of fine-tuning" in result.output
    written = json.loads(path.read_text(encoding="utf-8"))
    assert written["speedups"] is None
    assert written["sensitivity"] == []
    assert 0.4 < written["fitted"]["gpu"] < 0.6
    rows = {row["name"]: row for row in written["rows"]}
    assert len(rows) == len(written["rows"]) == 26
    assert rows["ZeRO-Inf: states read"]["found"] == 6.0
    assert drawn == [image]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "table-1,figure-4"], "figure-4"),
        (["--picture", "x.docx", "--output", "x.json"], ".docx"),
        (["--output", "/dev/null/x.json"], "/dev/null"),
        (["--bench", "."], "bench_smartssd.py"),
    ],
)
def test_wrong_options_of_smart_infinity_are_refused_before_anything_runs(
    arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "smartssd.json").write_text("{}", encoding="utf-8")
    result = RUNNER.invoke(app, ["smart-infinity", *arguments], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output
    assert [each.name for each in tmp_path.iterdir()] == ["smartssd.json"]
