"""The GPT in several processes with its optimizer in the memory devices: COARSE, DENSE, resumed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.deep


def trained(folder: Path, *options: str, workers: int = 4) -> str:
    """The last line that the example prints: the digest of the parameters."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(workers)]
    done = subprocess.run(
        [*command, str(ROOT / "examples" / "coarse_stored.py"), *options],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.startswith("parameters ")
    return last


def device(number: int) -> tuple[str, str]:
    return "--device", f"golden:coarse?devices={number}&rules=adam,sgd"


def test_a_training_that_goes_on_from_a_snapshot_has_the_bits_of_one_that_never_ended(
    tmp_path: Path,
) -> None:
    whole = trained(tmp_path)
    trained(tmp_path, "--steps", "5", "--snapshots", "stored")
    assert trained(tmp_path, "--begin", "5", "--snapshots", "stored") == whole
    assert trained(tmp_path, *device(4)) == whole  # another rule in the kernel changes no bit


def test_two_workers_have_the_same_bits_with_coarse_and_with_dense(tmp_path: Path) -> None:
    """Two numbers have one sum."""
    found = {trained(tmp_path, *device(number), workers=2) for number in (1, 2, 4)}
    assert len(found) == 1


def test_rtl_has_the_bits_of_golden(tmp_path: Path) -> None:
    rtl = "sim:coarse?devices=4&window=direct&rules=adam&fu=native"
    few = ("--steps", "2", "--context", "16")
    assert trained(tmp_path, "--device", rtl, *few) == trained(tmp_path, *few)
