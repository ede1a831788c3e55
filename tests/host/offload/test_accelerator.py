"""Layers on an accelerator: a fake one (`accelerator.cpp`), and CUDA where that is.

An accelerator cannot be taken away again, so each runs in a process of its own.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
TOPK = HERE / "on_accelerator_topk.py"
CASES = [HERE / "on_accelerator.py", HERE / "on_accelerator_places.py"]


def passed(compute: str, *arguments: str | Path) -> int:
    """Tests that have passed with layers on `compute`; none has failed."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-p", "no:cacheprovider"]
    environment = {**os.environ, "NEARSTEP_TEST_COMPUTE": compute}
    done = subprocess.run(
        [*command, *map(str, arguments)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    found = re.search(r"(\d+) passed", done.stdout)
    assert found is not None, done.stdout[-2000:]
    return int(found[1])


@pytest.mark.deep
def test_every_case_on_an_accelerator() -> None:
    assert passed("accel", *CASES) >= 48


@pytest.mark.deep
def test_gradients_are_compressed_on_an_accelerator() -> None:
    assert passed("accel", TOPK, HERE / "test_compressed.py") >= 44


@pytest.mark.deep
def test_every_training_on_an_accelerator() -> None:
    files = [
        HERE / f"test_{name}.py"
        for name in ("equality", "memferry", "faults", "gradients", "shadow", "programs", "torch")
    ]
    assert passed("accel", "-m", "not deep", *files) >= 130


@pytest.mark.deep
def test_several_workers_on_an_accelerator() -> None:
    names = "two_workers or refused or (three_workers and 0)"
    assert passed("accel", "-m", "deep or not deep", HERE / "test_workers.py", "-k", names) == 3


@pytest.mark.deep
def test_random_trainings_on_an_accelerator() -> None:
    assert passed("accel", HERE / "test_equality.py", "-k", "many_random") == 20


@pytest.mark.skipif(
    not torch.cuda.is_available(),
    reason="torch finds no CUDA here: streams, pinned and mapped memory are checked on a fake "
    "accelerator alone, by deep tests",
)
def test_on_cuda() -> None:
    assert passed("cuda", *CASES) >= 32
    assert passed("cuda", TOPK) >= 25
    assert passed("cuda", "-m", "not deep", HERE / "test_equality.py") >= 18
