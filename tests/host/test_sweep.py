"""Sweeps: grids, hashes, interruptions, and what fails."""

from __future__ import annotations

import csv
import json
import os
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from nearstep.cli.sweep import command
from nearstep.errors import ArgumentError
from nearstep.sweep import Sweep, SweepError, inputs, key

RUNNER = CliRunner()
APP = typer.Typer()
APP.command()(command)
GRID = """
run = "train"
[fixed]
parameters = 96
[axes]
dtype = ["fp32", "bf16"]
device = ["host:", "golden:axdimm"]
seed = [1, 2]
[[without]]
dtype = "bf16"
seed = 2
"""
POINTS = 6


def grid(folder: Path, text: str = GRID) -> Path:
    path = folder / "grid.toml"
    path.write_text(text, encoding="utf-8")
    return path


def run(*arguments: object) -> tuple[int, str]:
    done = RUNNER.invoke(APP, [*map(str, arguments)], env={"COLUMNS": "200"})
    return done.exit_code, done.output


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.json")}


def doubled(*, of: int) -> dict[str, int]:
    """A function of a sweep."""
    return {"twice": 2 * of, "process": os.getpid()}


def halved(*, lr: float) -> dict[str, float]:
    return {"lr": lr / 2, "errors": 0, "note": ""}


def failing(*, of: int) -> dict[str, int]:
    if of == 2:
        raise ArgumentError("two is refused")
    return {"of": of}


def test_results_are_equal_on_one_and_two_workers_and_an_interrupted_sweep_goes_on(
    tmp_path: Path,
) -> None:
    sweep = Sweep.read(grid(tmp_path))
    assert len(sweep.points) == POINTS
    one, two = tmp_path / "one", tmp_path / "two"
    sweep.run(one)
    counts: list[int] = []
    sweep.run(two, backend="threading", jobs=2, report=counts.append)
    assert files(one) == files(two)
    assert len(files(one)) == POINTS == counts[-1]
    lost = sorted(one.glob("*.json"))[:2]
    times = {path: path.stat().st_mtime_ns for path in one.glob("*.json") if path not in lost}
    for path in lost:
        path.unlink()
    assert len(sweep.missing(one)) == 2
    sweep.run(one)
    assert files(one) == files(two)
    assert all(path.stat().st_mtime_ns == time for path, time in times.items())
    digests = {(p["device"][:4], p["dtype"], p["seed"]): r["sha256"] for p, r in sweep.results(one)}
    assert len({*digests.values()}) == 4  # a device has an fp32 master of bf16, `host:` has none
    for seed in (1, 2):
        assert digests["host", "fp32", seed] == digests["gold", "fp32", seed]


def test_a_name_depends_on_all_inputs() -> None:
    names = {
        key(function, point)
        for function in ("m:f", "m:g")
        for point in ({"a": 1}, {"a": 2}, {"b": 1}, {"a": 1, "b": 1}, {"a": "1"})
    }
    assert len(names) == 10
    assert key("m:f", {"a": 1, "b": 2}) == key("m:f", {"b": 2, "a": 1})
    assert inputs("m:f", {})["nearstep"]


def test_a_function_of_ones_own_runs_in_processes(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "mine.py").write_text(
        "import os\ndef doubled(*, of):\n    return {'twice': 2 * of, 'process': os.getpid()}\n"
    )
    import joblib

    for _ in joblib.Parallel(2, "loky")(joblib.delayed(abs)(n) for n in range(4)):
        pass  # its processes wait for another call, and cannot import `mine`
    monkeypatch.syspath_prepend(tmp_path)
    sweep = Sweep.read(grid(tmp_path, 'run = "mine:doubled"\n[axes]\nof = [1, 2, 3]\n'))
    sweep.run(tmp_path, backend="loky", jobs=2)
    found = sweep.results(tmp_path)
    assert [r["twice"] for _, r in found] == [2, 4, 6]
    assert os.getpid() not in {r["process"] for _, r in found}


def test_points_that_fail_are_named_and_the_others_are_kept(tmp_path: Path) -> None:
    text = f'run = "{__name__}:failing"\n[axes]\nof = [1, 2, 3]\n'
    sweep = Sweep.read(grid(tmp_path, text))
    with pytest.raises(SweepError, match="two is refused") as caught:
        sweep.run(tmp_path, backend="threading")
    assert caught.value.failed[0][0] == {"of": 2}
    assert len(files(tmp_path)) == 2
    code, output = run(tmp_path / "grid.toml", "--folder", tmp_path, "--backend", "threading")
    assert code == 1, output
    assert "two is refused" in output
    rows = [line.split("│")[1].strip() for line in output.splitlines() if line.startswith("│")]
    assert rows == ["1", "3"]  # results of the others


def test_a_file_of_other_inputs_is_refused(tmp_path: Path) -> None:
    text = f'run = "{__name__}:doubled"\n[axes]\nof = [1]\n'
    sweep = Sweep.read(grid(tmp_path, text))
    sweep.run(tmp_path, backend="threading")
    path = sweep.file(tmp_path, {"of": 1})
    path.write_text(path.read_text().replace('"of": 1', '"of": 7'))
    with pytest.raises(ArgumentError, match="has the inputs"):
        sweep.results(tmp_path)


def test_the_command_prints_writes_and_plots(tmp_path: Path) -> None:
    text = f'run = "{__name__}:doubled"\n[axes]\nof = [1, 2, 3]\n'
    path, table, image = grid(tmp_path, text), tmp_path / "t.csv", tmp_path / "p.png"
    options = ("--folder", tmp_path / "r", "--backend", "threading", "--only", "twice")
    code, output = run(path, *options, "-o", table, "-p", image)
    assert code == 0, output
    assert "twice" in output
    rows = [*csv.reader(table.open())]
    assert rows == [["of", "twice"], ["1", "2"], ["2", "4"], ["3", "6"]]
    assert image.read_bytes()[1:4] == b"PNG"
    code, output = run(path, *options, "--json")
    assert [each["twice"] for each in json.loads(output)] == [2, 4, 6]
    code, output = run(path, *options[:-1], "thrice")
    assert (code, "must be of twice, process" in output) == (2, True), output


def test_results_of_an_axis_name_and_results_that_are_zero_are_in_the_table(tmp_path: Path) -> None:
    path = grid(tmp_path, f'run = "{__name__}:halved"\n[axes]\nlr = [1.0, 2.0]\n')
    code, output = run(path, "--folder", tmp_path, "--backend", "threading", "-o", tmp_path / "t")
    assert code == 0, output
    rows = [*csv.reader((tmp_path / "t").open())]
    assert rows == [["lr", "lr", "errors", "note"], ["1", "0.5", "0", ""], ["2", "1", "0", ""]]


def test_a_module_beside_the_file_is_found_and_a_killed_process_is_a_reason(
    tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "killed_at_two.py").write_text(
        "import os\ndef f(*, of):\n    of == 2 and os.kill(os.getpid(), 9)\n    return {}\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = grid(tmp_path, 'run = "killed_at_two:f"\n[axes]\nof = [1, 2, 3]\n')
    code, output = run(path, "--folder", tmp_path, "--jobs", 2)
    assert (code, "SIGKILL" in output) == (1, True), output
    missing = Sweep.read(path).missing(tmp_path)
    assert {"of": 2} in missing
    assert f"{len(missing)} points failed" in output


@pytest.mark.parametrize("options", [[], ["--only", "x"], ["-p", "x.png"]], ids=" ".join)
def test_a_point_that_fails_alone_is_the_reason_whatever_is_asked_of_the_table(options, tmp_path):
    (tmp_path / "fails_at_two.py").write_text("def f(*, of):\n    raise ValueError('too odd')\n")
    path = grid(tmp_path, 'run = "fails_at_two:f"\n[axes]\nof = [2]\n')
    code, output = run(path, "--folder", tmp_path / "r", *options)
    assert (code, "too odd" in output) == (1, True), output


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("run = 1", "run must be a str, not 1"),
        ("", "run must be given"),
        ("run = 'train'\naxis = 1", "axis must be of run, fixed, axes, without, submitit"),
        ("run = 'train'\n[axes]\nseed = []", "axes.seed must be a list of values"),
        ("run = 'train'\n[axes]\nseed = 3", "axes.seed must be a list of values, not 3"),
        ("run = 'train'\n[fixed]\nseed = 1\n[axes]\nseed = [3]", "in fixed and in axes"),
        ("run = 'train'\n[axes]\nseed = [3, 3]", "in the grid twice"),
        ("run = 'train'\n[axes]\nseed = [3]\n[[without]]\nsed = 3", "of axes, not 'sed'"),
        ("run = 'train'\n[axes]\nseed = [3]\n[[without]]\nseed = 3", "there is no point"),
        ("run = 'plan'\n[axes]\nrank = [8]", "missing a required argument|unexpected keyword"),
        ("run = 'nearstep.sweep:no'", "run must be train, plan or module:name"),
        ("run = 'no'", "run must be train, plan or module:name"),
        ("run = 'wrong_at_import:f'", "not 'wrong_at_import:f': ZeroDivisionError: division"),
        ("run = 'no_python:f'", "not 'no_python:f': SyntaxError"),
        (f"run = 'train'\n[axes]\nseed = [{'1' * 5000}]", "digits"),
        ("run = 'train'\n[axes]\nseed = [2026-01-01]", "not JSON serializable"),
        ("run = ", "Invalid value"),
    ],
)
def test_a_file_that_is_wrong_is_refused_before_anything_runs(
    text: str, words: str, tmp_path: Path, monkeypatch
) -> None:
    (tmp_path / "wrong_at_import.py").write_text("1 / 0\n")
    (tmp_path / "no_python.py").write_text("1 +\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ArgumentError, match=words):
        Sweep.read(grid(tmp_path, text))
    code, _ = run(tmp_path / "grid.toml", "--folder", tmp_path / "r")
    assert code == 2
    assert not (tmp_path / "r").exists()


def test_the_example_is_that_of_the_docs_and_can_be_read() -> None:
    root = Path(__file__).resolve().parents[2]
    text = (root / "examples" / "sweep.toml").read_text(encoding="utf-8")
    assert f"```toml\n{text}```" in (root / "docs" / "command-line.md").read_text(encoding="utf-8")
    assert len(Sweep.read(root / "examples" / "sweep.toml").points) == 10


def test_another_backend_is_refused(tmp_path: Path) -> None:
    code, output = run(grid(tmp_path), "--backend", "threads", "--folder", tmp_path / "r")
    assert (code, "must be of loky" in output) == (2, True), output


def test_no_jobs_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="jobs must be above 0, not 0"):
        Sweep.read(grid(tmp_path)).run(tmp_path / "r", backend="threading", jobs=0)
    assert run(grid(tmp_path), "--jobs", 0)[0] == 2
    assert not (tmp_path / "r").exists()
