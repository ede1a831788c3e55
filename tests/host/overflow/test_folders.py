"""Drives that are given as folders, and the estimate of a step."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from nearstep.errors import ArgumentError
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_errors import (
    DriveAccessError,
    DriveFullError,
    DriveVanishedError,
    NotADriveError,
    StorageError,
)
from nearstep.torch.homes import drive

from .jobs import Job, everything
from .programs import Fault, FaultPoint

JOB = Job([(70, 70), (300, 41), (3,)])
MEMORY = {"memory": "1MiB"}
NAME = "optimizer.nearstep"


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    made = [tmp_path / name for name in "ab"]
    for each in made:
        each.mkdir()
    return made


def test_training_goes_on_in_folders(folders: list[Path], tmp_path: Path) -> None:
    expected = JOB.after("host:", 5)
    _, optimizer = JOB.trained("host:", 3, drives=folders, **MEMORY)
    assert [path.name for each in folders for path in each.iterdir()] == [NAME] * 2
    size = (folders[0] / NAME).stat().st_size
    assert size == (folders[1] / NAME).stat().st_size > 3 * 12 * (70 * 70 + 300 * 41) // 2
    del optimizer
    with pytest.raises(NotADriveError, match="must be an empty file"):
        JOB.trained("host:", drives=folders, **MEMORY)
    again, resumed = JOB.resumed("host:", drives=folders, **MEMORY)
    JOB.go_on(again, resumed, (3,))
    del resumed
    moved = tmp_path / "c"
    moved.mkdir()
    third, copied = JOB.resumed("host:", resume=folders, drives=[moved], **MEMORY)
    assert everything(third, JOB.go_on(third, copied, (4,))) == expected


def gone(folders: list[Path]) -> Any:
    folders[1].rmdir()
    return [folders[0], f"{folders[1]}/"], DriveAccessError


def readable_alone(folders: list[Path]) -> Any:
    return [folders[0], "/proc"], DriveAccessError  # whoever runs this


def taken(folders: list[Path]) -> Any:
    (folders[1] / NAME).mkdir()
    return folders, NotADriveError


def twice(folders: list[Path]) -> Any:
    return [folders[0], folders[0]], ArgumentError


@pytest.mark.parametrize("bad", [gone, readable_alone, taken, twice])
def test_folders_that_cannot_be_used_are_errors_and_nothing_is_left(folders, bad) -> None:
    parameters = JOB.parameters()
    drives, error = bad(folders)
    with pytest.raises(error):
        JOB.make(parameters, "host:", drives=drives, **MEMORY)
    found = (path for each in folders if each.exists() for path in each.rglob("*"))
    assert not any(path.is_file() for path in found)
    with pytest.raises((StorageError, ArgumentError)):
        JOB.make(parameters, "host:", drives=drives, resume=True, **MEMORY)


def test_a_full_folder_is_left_as_it_was(folders: list[Path]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, limits[1]))
    try:
        with pytest.raises(DriveFullError, match=NAME):
            JOB.make(JOB.parameters(), "host:", drives=folders, **MEMORY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not any(os.listdir(each) for each in folders)


def test_a_folder_without_a_drive_has_nothing_to_resume(folders: list[Path]) -> None:
    with pytest.raises(DriveVanishedError, match=NAME):
        JOB.resumed("host:", drives=folders, **MEMORY)
    assert not any(os.listdir(each) for each in folders)


def test_drives_are_found_from_another_directory(tmp_path: Path, monkeypatch) -> None:
    """By later steps, and where they are opened again after an error."""
    point = FaultPoint()
    with point.installed():
        monkeypatch.chdir(tmp_path)
        parameters, optimizer = JOB.trained("host:", 1, drives=["a", "b"], **MEMORY)
        monkeypatch.chdir("/")
        JOB.step(optimizer, parameters, 1)
        with point.arm(Fault("write", 0, 1, done=False)), pytest.raises(StorageError):
            JOB.step(optimizer, parameters, 2)
        JOB.step(optimizer, parameters, 2)
        assert everything(parameters, optimizer) == JOB.after("host:", 3)


def test_a_terminal_is_told_once_how_long_a_step_takes(folders, monkeypatch, capsys) -> None:
    times = iter([10.0, 12.0, 20.0, 21.0])
    monkeypatch.setattr(drive, "perf_counter", lambda: next(times))
    _, optimizer = JOB.trained("host:", 1, drives=folders, **MEMORY)
    assert capsys.readouterr().err == "", "standard error is no terminal"
    del optimizer
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "NO_COLOR"):
        monkeypatch.setenv(name, "1")
    again, resumed = JOB.resumed("host:", drives=folders, **MEMORY)
    JOB.go_on(again, resumed, (1, 2))
    said = capsys.readouterr().err
    assert said.count("\n") == 1, said
    assert said.startswith("state 137.9 kB on 2 drives, ")
    read = (5 + 13 + 1) * BLOCK_BYTES  # parameters, in a second
    assert (
        f"at most {5 * 68_812 / read:.2g} s a step at the measured {read / 1000:.1f} kB/s" in said
    )
