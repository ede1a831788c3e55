"""The example with several workers: no bit different from torch's DDP alone, within the budget."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "train_workers.py"
ROW = re.compile(r"^│\s+(\d+) │\s+[\d.]+ │\s+[\d.]+ │\s+([\d,]+) │\s+([\d,]+) │\s+0 │$")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLE), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.deep
@pytest.mark.parametrize("policy", ["memferry", "prefetch"])
@pytest.mark.parametrize("workers", [2, 3])
def test_workers_have_the_bits_of_torch_alone(workers: int, policy: str) -> None:
    done = run("--workers", str(workers), "--batch", "6", "--steps", "2", "--policy", policy)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "482,304 bytes of parameters; 0 bits different from DDP alone" in done.stdout
    rows = [match.groups() for match in map(ROW.match, done.stdout.splitlines()) if match]
    assert [number for number, *_ in rows] == [str(n) for n in range(workers)]
    for _, *figures in rows:
        peak, budget = (int(each.replace(",", "")) for each in figures)
        assert 0 < peak <= budget


@pytest.mark.deep
def test_what_cannot_be_is_refused() -> None:
    refusals = (
        (("--batch", "3"), "3 is no multiple of 2 workers"),
        (("--policy", "none"), "'none' is not one of"),
        (("--size", "huge"), "'huge' is not one of"),
        (("--bucket-mb", "9"), "No such option: --bucket-mb"),
        (("--budget", "1%", "--policy", "prefetch"), "gradients: the budget must be at least"),
    )
    for arguments, message in refusals:
        done = run(*arguments)
        assert done.returncode != 0, arguments
        assert message in re.sub(r"[\s│]+", " ", done.stdout + done.stderr), arguments
        assert "Traceback" not in done.stdout + done.stderr, arguments
    assert len(refusals) == 5
