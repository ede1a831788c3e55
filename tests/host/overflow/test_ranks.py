"""Processes of a job, each with drives of its own, go on at one step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from nearstep.storage.drive_errors import NoGenerationError, StorageError
from nearstep.storage.drive_set import drives_in
from nearstep.storage.store import Store
from nearstep.torch.homes.errors import RanksDifferError

from ...on_a_drive import on_a_drive
from ...processes import on_processes
from .jobs import Job, everything

JOB = Job([(16, 16), (16,)])
GOLDEN = "golden:smartssd?memory_bytes=1MiB"


def gloo() -> str:
    return "gloo"


def make(folder: Path, resume: Any) -> tuple[list[Any], Any]:
    parameters = JOB.parameters()
    device = f"{GOLDEN}&chunk_bytes=512&subgroup_elements=1024&drive={folder}"
    return parameters, JOB.make(parameters, device, resume=resume)


def train(folder: Path, steps: range, resume: Any = False) -> dict[str, bytes]:
    parameters, optimizer = make(folder, resume)
    for step in steps:
        JOB.step(optimizer, parameters, step)
    found = everything(parameters, optimizer)
    optimizer.store.close()
    return found


def differing(folder: Path) -> tuple[dict[int, dict[int, int]], int | None, list[dict[str, bytes]]]:
    """Power fails after rank 0 has made its third step, and before rank 1 has."""
    rank = dist.get_rank()
    own = folder / f"rank{rank}"
    if rank:
        train(own, range(2))
    with pytest.raises(StorageError) as first:  # rank 0 has nothing
        make(own, True)
    assert isinstance(first.value, RanksDifferError) == bool(rank)
    assert "rank 0: does not resume" in str(first.value) or not rank
    if not rank:
        train(own, range(3))
    with pytest.raises(RanksDifferError, match="rank 1: step 2") as caught:
        make(own, True)
    with pytest.raises(NoGenerationError):
        make(own, 9)
    found = [train(own, range(2, 3), "common"), train(own, range(0), True)]
    with Store.open(drives_in(own), owner=None) as store:
        older = min(store.generations)
    found.append(train(own, range(2, 3), older))
    return caught.value.ranks, caught.value.common, found


def test_ranks_whose_last_steps_differ_are_named_and_go_on_from_the_common_one(
    tmp_path: Path,
) -> None:
    parameters, optimizer = JOB.trained(GOLDEN, 3)
    expected = everything(parameters, optimizer)
    with on_a_drive(tmp_path) as folder:
        results = on_processes(
            2, differing, folder, backend=gloo, preloaded=["torch._dynamo"], timeout_s=60.0
        )
    assert len(results) == 2
    for ranks, common, found in results:
        assert ranks == {0: {4: 3, 3: 2}, 1: {3: 2, 2: 1}}
        assert common == 2
        assert found == [expected] * 3


def test_a_process_alone_resumes_the_last_step_as_the_common_one_and_the_one_before_by_number(
    tmp_path: Path,
) -> None:
    with on_a_drive(tmp_path) as folder:
        third = train(folder / "d", range(3))
        assert train(folder / "d", range(0), "common") == third
        second = train(folder / "d", range(0), 3)
        assert second != third
        assert train(folder / "d", range(2, 3), 3) == third
