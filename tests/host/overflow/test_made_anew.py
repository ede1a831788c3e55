"""After an error of a drive an optimizer can be made anew, whoever refers to the other one."""

from __future__ import annotations

import contextlib
import gc
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nearstep.storage.blocks import BlockFile
from nearstep.storage.drive_errors import (
    DriveFullError,
    DriveLockedError,
    StorageError,
    UncertainCommitError,
)
from nearstep.torch.homes.errors import ResumeError

from ...on_a_drive import on_a_drive
from .jobs import Job, everything
from .programs import Fault, FaultPoint

JOB = Job([(16, 16), (16,), (16, 12)])
CARDS = "golden:smartssd?cards=2&chunk_bytes=512&memory_bytes=1MiB&subgroup_elements=256"
DIMM = "golden:axdimm?memory_bytes=1MiB"
LASTS = 1 << 30


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Nothing is collected that somebody refers to, in a cycle or not."""
    gc.collect()
    gc.disable()
    try:
        with on_a_drive(tmp_path) as found:
            yield found
    finally:
        gc.enable()


def make(home: str, folder: Path, **more: Any) -> tuple[list[Any], Any]:
    parameters = JOB.parameters()
    if home == "cards":
        return parameters, JOB.make(parameters, f"{CARDS}&drive={folder}", **more)
    drives = [folder / "a", folder / "b"]
    return parameters, JOB.make(parameters, DIMM, drives=drives, memory=4500, **more)


@pytest.mark.parametrize("times", [1, LASTS])
@pytest.mark.parametrize("action", ["read", "write", "flush"])
@pytest.mark.parametrize("home", ["cards", "host"])
def test_beside_the_optimizer_whose_step_failed(
    home: str, action: str, times: int, folder: Path
) -> None:
    point = FaultPoint()
    with point.installed():
        parameters, optimizer = make(home, folder)
        JOB.step(optimizer, parameters, 0)
        before = everything(parameters, optimizer)
        with point.arm(Fault(action, 1, times, done=False)), pytest.raises(StorageError) as caught:
            JOB.step(optimizer, parameters, 1)
        again, anew = make(home, folder, resume=True)
        assert everything(again, anew) == before
        with pytest.raises(DriveLockedError):
            JOB.step(optimizer, parameters, 1)
        JOB.step(anew, again, 1)
        anew.store.close()
        with pytest.raises(StorageError, match="another's"):
            optimizer.state_dict()
        assert caught.value is not None


def test_another_step_of_the_number_of_a_lost_commit_is_not_taken_for_it(folder: Path) -> None:
    with (point := FaultPoint()).installed():
        parameters, optimizer = make("host", folder)
        JOB.step(optimizer, parameters, 0)
        before = {path: path.read_bytes() for path in folder.iterdir()}
        superblock = Fault("flush", 2, LASTS, done=False)
        with point.arm(superblock), pytest.raises(UncertainCommitError):
            JOB.step(optimizer, parameters, 1)
        for path, data in before.items():
            path.write_bytes(data)
        again, anew = make("host", folder, resume=True)
        JOB.step(anew, again, 2)
        anew.store.close()
        with pytest.raises(ResumeError, match="another's"):
            optimizer.state_dict()


def test_drives_that_generations_have_filled_are_used_again_once_one_is_dropped(
    folder: Path,
) -> None:
    with FaultPoint().installed():
        parameters, optimizer = make("host", folder)

        def fill() -> None:
            for step in range(100):
                JOB.step(optimizer, parameters, step)
                optimizer.keep(f"after {step}")

        with pytest.raises(DriveFullError):
            fill()
        optimizer.store.drop("after 0")
        for step in range(2):
            optimizer.keep(f"again {step}")
        before = everything(parameters, optimizer)
        JOB.step(optimizer, parameters, 200)
        assert everything(parameters, optimizer) != before


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize(("action", "number"), [("write", 1), ("flush", 1), ("flush", 2)])
def test_a_generation_that_was_dropped_before_a_step_that_fails_stays_dropped(
    action: str, number: int, done: bool, folder: Path
) -> None:
    """The drives are opened again after the error; the second flush leaves a commit in doubt."""
    with (point := FaultPoint()).installed():
        parameters, optimizer = make("host", folder)
        JOB.step(optimizer, parameters, 0)
        for name in ("best", "other"):
            optimizer.keep(name)
        optimizer.store.drop("best")
        with point.arm(Fault(action, number, 1, done=done)), contextlib.suppress(StorageError):
            JOB.step(optimizer, parameters, 1)
        assert point.fired == 1
        assert optimizer.store.kept == {"other": 4}
        JOB.step(optimizer, parameters, 2)
        optimizer.keep("best")
        assert optimizer.store.kept == {"other": 4, "best": optimizer.store.generation}


@pytest.mark.parametrize("home", ["cards", "host"])
def test_after_a_resume_that_met_a_damaged_block(
    home: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block in turn that a resume reads behind what says where tensors are."""
    parameters, optimizer = make(home, folder)
    for step in range(2):
        JOB.step(optimizer, parameters, step)
    last = everything(parameters, optimizer)
    optimizer.store.close()
    real, left, errors = BlockFile.read, 0, []

    def damaged(blocks: BlockFile, block: int, out: Any) -> None:
        nonlocal left
        real(blocks, block, out)
        left -= 1
        if left == 0 and block > 3:
            out[0] ^= 1

    for number in range(1, 30):
        with monkeypatch.context() as patch:
            patch.setattr(BlockFile, "read", damaged)
            left = number
            try:
                make(home, folder, resume=True)[1].store.close()
            except StorageError as error:
                errors.append(error)
        again, anew = make(home, folder, resume=True)
        assert everything(again, anew) == last
        anew.store.close()
    assert len(errors) >= 3


@pytest.mark.parametrize("cards", [1, 2])
def test_a_step_frees_its_copy_of_16_bit_parameters_without_a_collector(
    cards: int, folder: Path
) -> None:
    parameter = torch.nn.Parameter(torch.ones(1 << 16, dtype=torch.bfloat16))
    device = f"golden:smartssd?cards={cards}&chunk_bytes=4096&memory_bytes=4MiB"
    formats = "&gradient_formats=fp32,bf16&copy_out_formats=bf16&subgroup_elements=32768"
    optimizer = Job([]).make([parameter], f"{device}{formats}&drive={folder}")
    parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    tracemalloc.start()
    try:
        held = []
        for _ in range(4):
            optimizer.step()
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
        optimizer.store.close()
    copy = 2 * parameter.numel()
    assert held[-1] - held[0] < copy
