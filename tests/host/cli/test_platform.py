"""`nearstep platform`: the list, what a machine consists of, checks of files, this machine."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from nearstep import cli
from nearstep.cli.platform import complete, figures
from nearstep.measure.host import Sizes
from nearstep_spec.platform.load import PARTS, load, parse, shipped
from nearstep_spec.platform.machine import Drive, Figure, Link, Platform, Processor

ROOT = Path(__file__).resolve().parents[3]
AXDIMM = ROOT / "hw" / "nearstep_spec" / "platform" / "machines" / "axdimm.toml"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NEARSTEP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli._app(), ["platform", *arguments], env={"COLUMNS": "300"})


def test_every_machine_is_listed() -> None:
    done = run("list")
    assert done.exit_code == 0
    assert len(shipped()) >= 7
    for name in shipped():
        assert name in done.stdout
        assert load(name).title in done.stdout
    assert "this" not in done.stdout


@pytest.mark.parametrize("name", shipped())
def test_every_figure_is_shown_with_origin_and_source(name: str) -> None:
    done = run("show", name)
    assert done.exit_code == 0
    checks = 0
    for part, entry, figure in figures(load(name)):
        (row,) = (
            line
            for line in done.stdout.splitlines()
            if [part, entry] == [cell.strip() for cell in line.split("│")[1:3]]
        )
        assert figure.origin in row
        assert figure.source[:40] in row
        checks += 1
    assert checks >= 5, checks


def test_values_have_units() -> None:
    text = run("show", "axdimm").stdout
    for value in ("6.4 GB/s", "140.32 MP/s", "112 TFLOP/s", "34.3597 GB", "15.7538 GB/s"):
        assert value in text


def test_json_is_the_whole_machine() -> None:
    found = json.loads(run("show", "axdimm", "--json").stdout)
    platform = load("axdimm")
    assert found["processors"]["cpu"]["adam_params_per_s"]["value"] == 140.32e6
    assert set(found["links"]) == set(platform.links)
    assert found["links"]["ddr"]["duplex"] == "half"


def test_a_file_is_checked_and_shown() -> None:
    done = run("check", str(AXDIMM))
    assert done.exit_code == 0
    assert "9 parts and links, figures: 11 paper, 10 datasheet" in done.stdout
    assert "140.32 MP/s" in run("show", str(AXDIMM)).stdout


def test_what_is_wrong_with_a_file_is_named_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "wrong.toml"
    text = AXDIMM.read_text().replace("140.32e6", "-1")
    file.write_text(text)
    line = next(i for i, each in enumerate(text.splitlines(), 1) if "value = -1" in each)
    for verb, status in (("check", 1), ("show", 2)):
        done = run(verb, str(file))
        assert done.exit_code == status
        expected = (
            f"error: {file}:{line}: processors.cpu.adam_params_per_s: must be a number above 0"
        )
        assert expected in done.stderr
    done = run("check", str(tmp_path / "nothing.toml"))
    assert (done.exit_code, "No such file" in done.stderr) == (2, True)


def test_this_machine_is_told_how_to_be_measured() -> None:
    done = run("show", "this")
    assert done.exit_code == 2
    assert "run `nearstep platform this`" in done.stderr


def test_this_machine_is_measured_kept_and_shown(
    monkeypatch: pytest.MonkeyPatch, cache: Path
) -> None:
    """What is measured has tests of its own; here it is a machine that is known."""
    asked: list[tuple[Path, int]] = []

    def measure(folder: Path, sizes: Sizes, report) -> Platform:
        asked.append((folder, sizes.file_bytes))
        report("a step")
        one = Figure(value=1.5e9, origin="measured", source="a test of it")
        return Platform(
            name="this",
            title="a machine",
            processors={"cpu": Processor(title="a CPU")},
            drives={"drive": Drive(title="a drive", capacity_bytes=one)},
            links={"bus": Link(ends=("cpu", "drive"), bytes_per_s=one)},
        )

    monkeypatch.setattr("nearstep.measure.host.measure", measure)
    done = run("this", "--file-mib", "3")
    assert done.exit_code == 0, done.output
    assert asked == [(cache, 3 << 20)]
    assert str(cache / "platform" / "this.toml") in done.stdout
    assert "1.5 GB/s" in done.stdout
    assert load("this").title == "a machine"
    assert "a machine" in run("list").stdout


def test_the_page_has_a_row_for_each_machine() -> None:
    page = (ROOT / "docs" / "platforms.md").read_text()
    for name in shipped():
        origins = [figure.origin for _, _, figure in figures(load(name))]
        counts = f"{origins.count('paper')} | {origins.count('datasheet')} |"
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{name}` |"))
        assert row.endswith(f"| {counts}"), (row, counts)


def test_the_description_on_the_page_is_one() -> None:
    page = (ROOT / "docs" / "platforms.md").read_text()
    (text,) = re.findall(r"^```toml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    platform = parse(text, "platforms.md")
    assert [hop.lane for hop in platform.route("ssd1", "cpu")] == [
        "ssd1 read",
        "lane1 ssd1>switch",
        "uplink switch>cpu",
        "cpu memory",
    ]
    for table, kind in PARTS.items():
        (row,) = (line for line in page.splitlines() if line.startswith(f"| `{table}` |"))
        for each in fields(kind):
            assert f"`{each.name}`" in row.replace("[`", "`"), (table, each.name)


def test_names_are_completed() -> None:
    assert complete("ax") == ["axdimm"]
    assert complete("th") == ["this"]
    assert set(complete("")) == {*shipped(), "this"}
