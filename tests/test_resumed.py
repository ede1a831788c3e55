"""A stopped run of tests goes on, and one of other files begins anew."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ALONE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTEST_ADDOPTS": ""}
TESTS = """
import os
import pytest

@pytest.mark.parametrize("number", range(3))
def test_a_number(number):
    assert number != int(os.environ["FAILS"])

def test_skipped():
    pytest.skip("always")
"""


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.deep)])
def test_a_run_goes_on_where_it_was(tmp_path: Path, workers: int) -> None:
    (tmp_path / "test_numbers.py").write_text(TESTS)
    record = tmp_path / "build" / "passed.tsv"

    def run(fails: int) -> tuple[int, str]:
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.resumed"]
        command += ["-p", "xdist", "-n", str(workers)] if workers else []
        ran = subprocess.run(
            [*command, f"--rootdir={tmp_path}", "--passed", record, tmp_path],
            env={**os.environ, "FAILS": str(fails), "PYTHONPATH": str(ROOT), **ALONE},
            capture_output=True,
            text=True,
            check=False,
        )
        return ran.returncode, ran.stdout

    code, text = run(1)
    assert code == 1, text
    assert "1 failed, 2 passed, 1 skipped" in text, text
    code, text = run(-1)  # what failed and what was skipped run again, and nothing else
    assert code == 0, text
    assert "1 passed, 1 skipped" in text, text
    assert "2 tests passed in earlier runs" in text, text
    assert "3 passed in all" in text, text
    (tmp_path / "test_numbers.py").write_text(TESTS.partition("def test_skipped")[0])
    code, text = run(-1)  # nothing is left
    assert code == 0, text
    assert "3 tests passed in earlier runs" in text, text
    lines = record.read_text().splitlines()
    record.write_text("\n".join(["# another commit", *lines[1:]]))
    code, text = run(1)
    assert code == 1, text
    assert "1 failed, 2 passed" in text, text
    assert "earlier" not in text, text
