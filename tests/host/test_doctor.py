"""``nearstep doctor`` and the check of prerequisites."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from nearstep import doctor

ROOT = Path(__file__).resolve().parents[2]


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
