"""A sharded GPT with state on drives, whose processes are killed: bits of a run left alone."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ..on_a_drive import on_a_drive

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.deep


def compared(folder: Path, *options: str) -> tuple[int, int]:
    """How many processes were killed, and the step from which the last ones went on; the example
    compares losses and bits."""
    with on_a_drive(folder) as place:
        done = subprocess.run(
            [sys.executable, str(ROOT / "examples" / "elastic_fsdp.py"), *options],
            cwd=place,
            capture_output=True,
            text=True,
            timeout=3000,
            check=False,
        )
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-6000:]
    for what in ("losses", "sha256"):
        ends = re.findall(rf"^(?:killed|alone): +{what} (.+)$", done.stdout, re.MULTILINE)
        assert len(ends) == 2, what
        assert ends[0] == ends[1], what
    went_on = re.search(r"went on to the end from step (\d+)", done.stdout)
    assert went_on is not None
    return len(re.findall(r" is killed ", done.stdout)), int(went_on[1])


@pytest.mark.parametrize(("backend", "seed"), [("gloo", 3), ("coarse", 2)])
def test_three_go_on_where_one_of_four_was_killed(backend: str, seed: int, tmp_path: Path) -> None:
    killed, step = compared(
        tmp_path, "--backend", backend, "--seed", str(seed), "--steps", "8", "--batch", "12"
    )
    assert killed == 1
    assert 1 <= step <= 8


@pytest.mark.parametrize(("backend", "kills"), [("gloo", 20), ("coarse", 20)])
def test_processes_that_are_killed_again_and_again_end_with_the_bits_of_an_undisturbed_run(
    backend: str, kills: int, tmp_path: Path
) -> None:
    steps = 2 * kills
    options = ["--ranks", "2", "--resume-with", "0", "--kills", str(kills), "--steps", str(steps)]
    killed, step = compared(tmp_path, *options, "--backend", backend)
    assert killed == kills
    assert 1 <= step <= steps
