"""`nearstep sweep` on Dask, Ray and submitit: the same files as in one process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

GRID = """
run = "train"
[fixed]
parameters = 96
[axes]
seed = [1, 2, 3, 4, 5, 6]
dtype = ["fp32", "bf16"]
"""
PACKAGES = {
    "loky": [],
    "dask": ["dask==2026.8.0", "distributed==2026.8.0"],
    "ray": ["ray==2.60.0"],
    "submitit": ["submitit==1.5.4"],
}

pytestmark = pytest.mark.deep


def sweep(folder: Path, *options: str, more: Mapping[str, str] = {}) -> dict[str, bytes]:
    grid = folder.parent / "grid.toml"
    grid.write_text(GRID, encoding="utf-8")
    command = [sys.executable, "-m", "nearstep", "sweep", str(grid), "--folder", str(folder)]
    done = subprocess.run(
        [*command, *options],
        env={**os.environ, **more},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {path.name: path.read_bytes() for path in folder.glob("*.json")}


@pytest.mark.parametrize("backend", PACKAGES)
def test_eight_workers_write_the_files_of_one(backend: str, tmp_path: Path) -> None:
    expected = sweep(tmp_path / "one", "--backend", "threading")
    assert len(expected) == 12
    more = tmp_path / "packages"
    if PACKAGES[backend]:
        pip = [sys.executable, "-m", "pip", "install", "-q", "--target", str(more)]
        subprocess.run([*pip, *PACKAGES[backend]], check=True, timeout=600)
    path = os.pathsep.join(filter(None, [str(more), os.environ.get("PYTHONPATH")]))
    options = ("--backend", backend, "--jobs", "8")
    assert sweep(tmp_path / "eight", *options, more={"PYTHONPATH": path}) == expected
