"""Files of cards' drives that are damaged, gone, full or slow."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import nearstep
from nearstep import cli
from nearstep.errors import OptionError
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive import TIMEOUT_S
from nearstep.storage.drive_errors import (
    DriveAccessError,
    DriveFullError,
    DriveLockedError,
    DriveSizeError,
    DriveTimeoutError,
    DriveVanishedError,
    NotADriveError,
    StorageError,
    TornExtentError,
)
from nearstep.storage.store import Store
from nearstep_sim.models.drive import MemoryBlocks

from ..overflow.jobs import Job, card_url, everything, images
from .test_faults import expected_after
from .test_moving import closed, expected, files, names, resumed, small, trained, url

__all__ = ["small"]

JOB = Job([(40, 16), (16,), (30, 20)])


def places(folder: Path, cards: int = 2) -> list[Path]:
    return [folder / name for name in names(cards)]


def flip(folder: Path, tensor: str) -> Path:
    """Change a bit of the last generation's; the drive that it is on."""
    paths = places(folder)
    with Store.open(paths, owner=None) as store:
        found = store.tensors[tensor].table.extent(0)
    with paths[found.drive].open("r+b") as file:
        file.seek(found.block * BLOCK_BYTES + 99)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 4]))
    return paths[found.drive]


def storage_check(folder: Path) -> tuple[int, Any]:
    found = CliRunner().invoke(cli._app(), ["storage", "check", "--json", str(folder)])
    return found.exit_code, json.loads(found.stdout)


def test_a_flipped_bit_is_named_and_the_step_before_is_there(tmp_path: Path) -> None:
    closed(url(tmp_path, 2), 3)
    assert storage_check(tmp_path)[0] == 0
    damaged = flip(tmp_path, "0.m@1")
    code, (report,) = storage_check(tmp_path)
    last, before = report["generations"]
    assert (code, len(last["problems"]), before["problems"]) == (1, 1, [])
    assert "'0.m@1'" in last["problems"][0]
    assert str(damaged) in last["problems"][0]

    parameters, optimizer = resumed(url(tmp_path, 2))
    with pytest.raises(TornExtentError, match="generation 3") as caught:
        JOB.step(optimizer, parameters, 3)
    error = caught.value
    assert (error.tensor, error.path, error.whole) == ("0.m@1", str(damaged), (3,))
    optimizer.store.close()
    with Store.open(places(tmp_path), owner=None, generation=3) as store:
        parameters, optimizer = resumed(card_url(2, 128), drives=store)
        assert everything(parameters, optimizer) == expected(2)
    flip(tmp_path, "0.p@0")
    with pytest.raises(TornExtentError, match="there is generation 3") as caught:
        resumed(url(tmp_path, 3))
    assert files(tmp_path) == names(2)  # nothing was made, and nothing removed


def test_a_step_that_failed_does_not_keep_the_drives_from_its_own_process(tmp_path: Path) -> None:
    """Nobody has the optimizer any more but the error, which has itself."""
    closed(url(tmp_path, 2), 3)
    flip(tmp_path, "0.m@1")
    parameters, optimizer = resumed(url(tmp_path, 2))
    with contextlib.suppress(TornExtentError):
        JOB.step(optimizer, parameters, 3)
        raise AssertionError("a flipped bit was not found")
    del parameters, optimizer
    flip(tmp_path, "0.m@1")
    parameters, optimizer = resumed(url(tmp_path, 2))
    assert everything(parameters, optimizer) == expected(3)
    with pytest.raises(DriveLockedError):  # somebody has this one
        resumed(url(tmp_path, 2))
    with pytest.raises(NotADriveError) as caught:
        trained(url(tmp_path, 2), 0)
    assert any("resume=True" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("options", ["", "&state_format=dynamic8"])
@pytest.mark.parametrize("cards", [1, 2])
def test_a_step_reads_no_more_than_it_needs(cards: int, options: str, tmp_path: Path) -> None:
    """The last extent of a tensor is written whole, whatever the number of parameters."""
    count = 600_001
    p = torch.nn.Parameter(torch.linspace(-1, 1, count))
    shape = f"cards={cards}&memory_bytes=16MiB&subgroup_elements=262144"  # whole blocks in 8 bits
    device = f"golden:smartssd?{shape}&drive={tmp_path}{options}"
    optimizer = nearstep.optim.AdamW([p], device=device)
    drives, moved = optimizer.store.drives, [(0, 0)]
    for _ in range(3):
        p.grad = torch.ones(count)
        optimizer.step()
        moved.append((sum(d.bytes_read for d in drives), sum(d.bytes_written for d in drives)))
    (read, written), last = moved[-2:]
    assert 0 < last[0] - read <= last[1] - written


@pytest.mark.parametrize("family", ["golden", "sim"])
def test_an_empty_name_of_a_directory_is_none(family: str) -> None:
    with pytest.raises(OptionError, match="drive must be a directory, not ''"):
        trained(f"{family}:smartssd?cards=2&drive=", 0)


def test_drives_that_are_gone_cut_off_or_may_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters, optimizer = trained(url(tmp_path, 2), 1)
    first, second = places(tmp_path)
    kept = second.read_bytes()
    second.unlink()
    before = [p.detach().clone() for p in parameters]
    with pytest.raises(DriveVanishedError, match="card1of2"):
        JOB.step(optimizer, parameters, 1)
    assert all(torch.equal(p, q) for p, q in zip(parameters, before, strict=True))
    optimizer.store.close()
    with pytest.raises(StorageError, match="card1of2"):
        resumed(url(tmp_path, 2))
    second.write_bytes(kept[: len(kept) // 2])
    with pytest.raises(DriveSizeError) as caught:
        resumed(url(tmp_path, 2))
    half = len(kept) // 2 // BLOCK_BYTES * BLOCK_BYTES
    assert (caught.value.expected, caught.value.actual) == (len(kept), half)
    second.write_bytes(bytes(len(kept)))
    with pytest.raises(NotADriveError, match="card1of2"):
        resumed(url(tmp_path, 2))
    second.write_bytes(kept)
    opened = os.open

    def read_only(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if str(path) == str(second) and flags & os.O_RDWR:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
        return opened(path, flags, *more, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", read_only)
        with pytest.raises(DriveAccessError, match="Read-only"):
            resumed(url(tmp_path, 2))
    found, optimizer = resumed(url(tmp_path, 2))
    assert everything(found, optimizer) == expected(1)
    optimizer.store.close()
    assert first.exists()


def test_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DriveFullError):
        trained(url(tmp_path, 2), 0)
    assert files(tmp_path) == []


@pytest.fixture
def stuck() -> Iterator[threading.Event]:
    """What a drive waits for."""
    event = threading.Event()
    yield event
    event.set()


def test_a_drive_that_does_not_answer(stuck: threading.Event) -> None:
    blocks = [MemoryBlocks(each, at) for at, each in enumerate(images(2))]
    store = Store.open(blocks, owner=None, queue_depth=2)
    parameters, optimizer = JOB.trained(card_url(2, 128), 1, drives=store)
    blocks[1].fault = lambda action, block: None if action == "look" else _wait(stuck)
    for drive in store.drives:
        drive.timeout_s = 0.15
    for _ in range(2):
        with pytest.raises(DriveTimeoutError, match=r"waited 0\.15 s"):
            JOB.step(optimizer, parameters, 1)
    for drive in store.drives:
        drive.timeout_s = TIMEOUT_S
    blocks[1].fault = lambda action, block: None
    stuck.set()
    assert everything(parameters, optimizer) == expected_after(1)
    JOB.step(optimizer, parameters, 1)
    assert everything(parameters, optimizer) == expected_after(2)
    store.close()


def _wait(event: threading.Event) -> None:
    assert event.wait(30)


def test_a_subgroup_that_a_card_has_no_room_for(tmp_path: Path) -> None:
    device = url(tmp_path, 2).replace("subgroup_elements=128", "subgroup_elements=131072")
    with pytest.raises(nearstep.errors.OptionError, match="memory_bytes must hold 2 subgroups"):
        trained(device, 0)
    assert files(tmp_path) == []
