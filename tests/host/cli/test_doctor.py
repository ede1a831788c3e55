"""`nearstep doctor` and the check of prerequisites."""

import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nearstep.cli import doctor
from nearstep_spec.compiler import compiler

ROOT = Path(__file__).resolve().parents[3]


def _app():
    import typer

    app = typer.Typer()
    app.command()(doctor.command)
    return app


def test_finds_what_this_test_runs_with() -> None:
    result = CliRunner().invoke(_app(), ["--json"])
    findings = {f["tool"]: f for f in json.loads(result.stdout)}
    assert len(findings) >= 15
    assert result.exit_code == 0
    for tool in ("python", "numpy", "pytest"):
        assert findings[tool]["ok"], tool
        assert findings[tool]["version"]


def test_a_missing_compiler_is_named_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    result = CliRunner().invoke(_app(), ["--json"])
    missing = [f for f in json.loads(result.stdout) if not f["ok"] and f["needed"]]
    assert result.exit_code == 1
    assert [f["tool"] for f in missing] == ["no-such-compiler"]
    assert "C++20" in missing[0]["remedy"]


OLD = """#!/bin/sh
case "$*" in
--version) echo "g++ (Old) 9.4.0" ;;
*-std=c++20*) echo "g++: error: unrecognized command-line option '-std=c++20'" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def old_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = tmp_path / "g++-old"
    path.write_text(OLD)
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    return str(path)


def test_an_old_compiler_is_found_and_said(old_compiler: str) -> None:
    result = CliRunner().invoke(_app(), ["--json"])
    (unfit,) = (f for f in json.loads(result.stdout) if not f["ok"] and f["needed"])
    assert result.exit_code == 1
    assert (unfit["tool"], unfit["version"]) == (old_compiler, "g++ (Old) 9.4.0")
    assert unfit["fault"].startswith("cannot compile C++20 (g++: error: unrecognized")
    text = " ".join(CliRunner().invoke(_app(), env={"COLUMNS": "1000"}).stdout.split())
    assert "unfit" in text
    assert "install a C++20 compiler: g++ 11 or newer" in text
    done = subprocess.run(
        ["sh", str(ROOT / ".ci" / "prerequisites")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "is g++ (Old) 9.4.0" in done.stderr


def test_a_compiler_may_be_several_words(monkeypatch: pytest.MonkeyPatch) -> None:
    command = shlex.join(["env", "LC_ALL=C", *compiler()])
    monkeypatch.setenv("CXX", command)
    findings = {f["tool"]: f for f in json.loads(CliRunner().invoke(_app(), ["--json"]).stdout)}
    assert findings[command]["ok"], findings
    done = subprocess.run(["sh", str(ROOT / ".ci" / "prerequisites")], check=False)
    assert done.returncode == 0


def test_every_package_that_is_depended_on_has_a_row() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    names = {re.split(r"[^\w-]", text)[0] for group in groups for text in group}
    assert len(names) >= 18
    assert names <= {finding.tool for finding in doctor.examine()}


def test_a_cache_that_cannot_be_written_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NEARSTEP_CACHE", str(tmp_path / "file" / "cache"))
    result = CliRunner().invoke(_app(), ["--json"])
    (row,) = (f for f in json.loads(result.stdout) if f["tool"] == "build cache")
    assert not row["ok"]
    assert row["fault"] == "cannot be written (Not a directory)"
    assert "NEARSTEP_CACHE" in row["remedy"]
    monkeypatch.setenv("NEARSTEP_CACHE", str(tmp_path / "cache"))
    result = CliRunner().invoke(_app(), ["--json"])
    (row,) = (f for f in json.loads(result.stdout) if f["tool"] == "build cache")
    assert row["ok"]
    assert row["version"] == f"{tmp_path / 'cache'}, 0 MB"


def test_prerequisites_say_in_plain_words_what_is_missing(tmp_path: Path) -> None:
    for name in ("sh", "make"):
        (tmp_path / name).symlink_to(Path(shutil.which(name) or name).resolve())
    environment = {"PATH": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(
        [str(tmp_path / "sh"), str(ROOT / ".ci" / "prerequisites")],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if line.startswith("missing: ")]
    assert [("g++" in line, "perl" in line) for line in lines] == [(True, False), (False, True)]


def test_prerequisites_are_content_with_this_machine() -> None:
    done = subprocess.run(["sh", str(ROOT / ".ci" / "prerequisites")], check=False)
    assert done.returncode == 0
