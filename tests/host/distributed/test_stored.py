"""torch's processes with an optimizer in the memory devices: its bits, and that it resumes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from nearstep.coarse.pool import CoarsePool

from ..coarse.of_torch import OfTorch, same
from ..coarse.service.oracle import expected_sum
from . import stored
from .processes import on_processes
from .stored import COMMON, DECAY, GROUPS, Result

SHARD_BYTES = 4 << 20
STEPS = 3


def device(devices: int) -> str:
    return f"golden:coarse?devices={devices}&groups=2&memory_bytes=64MiB&rules=adam,sgd"


def check(devices: int, results: list[Result]) -> int:
    """Compare with torch's optimizer after the same average; the number of parameters."""
    with CoarsePool.open(device(devices)) as pool:
        config = pool.device.config
    checked = 0
    for number, options in enumerate(GROUPS):
        hyper = {**COMMON, **options}
        oracle = OfTorch(results[0].first[number], torch.optim.AdamW, **hyper)
        for step in range(STEPS):
            gradients = [each.gradients[step][number] for each in results]
            if devices == 1:
                total = np.add.accumulate(gradients)[-1]
            else:
                total = expected_sum(
                    gradients,
                    devices=devices,
                    operation="sum",
                    wire="fp32",
                    shard_bytes=SHARD_BYTES,
                    config=config,
                )
            oracle.optimizer.param_groups[0]["lr"] = hyper["lr"] * DECAY**step
            expected = oracle.step(total * np.float32(1 / len(results)))
            for each in results:
                checked += same(each.parameters[step][number], expected)
    return checked


@pytest.mark.parametrize(
    ("processes", "devices"),
    [(2, 2), (3, 1), pytest.param(4, 4, marks=pytest.mark.deep)],
    ids=["coarse", "dense", "more"],
)
def test_bits_are_those_of_torch_after_the_same_average(processes, devices) -> None:
    results = on_processes(processes, stored.train, device(devices), STEPS, backend="gloo")
    parameters = sum(each.size for each in results[0].first)
    assert check(devices, results) == processes * STEPS * parameters


def test_a_job_resumes_bit_for_bit_from_its_snapshot(tmp_path: Path) -> None:
    folder = str(tmp_path)
    whole = on_processes(2, stored.train, device(2), STEPS, folder, backend="gloo")
    rest = on_processes(2, stored.train, device(1), STEPS, folder, True, backend="gloo")
    checked = 0
    for mine, its in zip(rest, whole, strict=True):
        for step in range(STEPS - 1):
            for number in range(2):
                checked += same(mine.parameters[step][number], its.parameters[step + 1][number])
    assert checked == 2 * (STEPS - 1) * sum(each.size for each in whole[0].first)


def test_what_cannot_be_is_refused() -> None:
    assert on_processes(2, stored.refused, device(2), backend="gloo") == [19, 19]
