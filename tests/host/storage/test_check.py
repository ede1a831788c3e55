"""`nearstep storage check`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from nearstep import cli
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.check import check_drives, sets_of
from nearstep.storage.drive_errors import (
    MOST_OTHERS,
    IncompleteSetError,
    NoDriveError,
    NotADriveError,
    StorageError,
)
from nearstep.storage.header import MAGIC
from nearstep.storage.store import Store
from nearstep_sim.models.drive import MemoryBlocks

from .drives import memory_set

EXTENT = 4 * BLOCK_BYTES
OWNER = "gpt"


@pytest.fixture
def drives(tmp_path: Path) -> list[Path]:
    """Two generations of two tensors, of which one has changed; and a tensor without blocks."""
    rng = np.random.default_rng(9)
    paths = [tmp_path / "a.drive", tmp_path / "b.drive"]
    with Store.create(
        paths, drive_bytes=64 * BLOCK_BYTES, owner=OWNER, extent_bytes=EXTENT, direct=False
    ) as store:
        store.add("same", 6 * EXTENT)
        store.add("p", 2 * EXTENT + 5)
        store.add("zeros", 1 << 20)
        store.write("same", rng.integers(0, 256, 6 * EXTENT, np.uint8))
        for step in (1, 2):
            store.write("p", rng.integers(0, 256, 2 * EXTENT + 5, np.uint8))
            store.commit({"step": step})
    return paths


def check(*arguments: object) -> Result:
    words = ["storage", "check", "--no-direct", *map(str, arguments)]
    return CliRunner().invoke(cli._app(), words)


def flip(path: Path, block: int, at: int = 5) -> None:
    data = bytearray(path.read_bytes())
    data[block * BLOCK_BYTES + at] ^= 1
    path.write_bytes(data)


def place_of(drives: list[Path], tensor: str, extent: int) -> tuple[Path, int]:
    with Store.open(drives, owner=OWNER, direct=False) as store:
        found = store.tensors[tensor].table.extent(extent)
    return drives[found.drive], found.block


def test_whole_drives_are_whole(drives, tmp_path) -> None:
    (tmp_path / "notes.txt").write_text("no drive")
    before = [path.read_bytes() for path in drives]
    for arguments in (drives, drives[::-1], [tmp_path], [tmp_path, *drives]):
        done = check(*arguments)
        assert done.exit_code == 0, done.output
        assert OWNER in done.output
        assert done.output.count("│ whole") == 2
    assert [path.read_bytes() for path in drives] == before
    (report,) = json.loads(check("--json", tmp_path).output)
    assert report["whole"] is True
    assert [
        (g["number"], g["tensors"], g["extents"], g["nbytes"], g["meta"])
        for g in report["generations"]
    ] == [(n, 3, 9, 6 * EXTENT + 2 * EXTENT + BLOCK_BYTES, {"step": n}) for n in (2, 1)]


@pytest.mark.parametrize(("tensor", "extent", "torn"), [("p", 1, [2]), ("same", 4, [2, 1])])
def test_a_flipped_bit_is_named(drives, tensor: str, extent: int, torn: list[int]) -> None:
    path, block = place_of(drives, tensor, extent)
    flip(path, block)
    done = check(*drives)
    assert done.exit_code == 1, done.output
    assert f"extent {extent} of {tensor!r}" in done.output
    assert f"blocks at {block} of {path}" in done.output
    (report,) = json.loads(check("--json", *drives).output)
    assert [g["number"] for g in report["generations"] if g["problems"]] == torn
    assert not report["whole"]


def test_every_problem_is_listed(drives) -> None:
    for extent in range(6):
        flip(*place_of(drives, "same", extent))
    assert check(*drives).output.count("problem: extent") == 12  # in either generation


def test_a_superblock_is_a_note_if_a_power_cut_can_have_torn_it_and_else_a_problem(drives) -> None:
    whole = drives[0].read_bytes()
    for block, torn in ((2, True), (63, True), (1, False), (62, False)):  # of generations 1 and 2
        flip(drives[0], block)
        done = check(*drives)
        kind = "note" if torn else "problem"
        assert (done.exit_code, done.output.count(f"{kind}: ")) == (int(not torn), 1), done.output
        assert f"block {block}: " in done.output
        assert done.output.count("│ whole") == 2
        drives[0].write_bytes(whole)
    for block in (1, 2, 62, 63):
        flip(drives[0], block)
    done = check(*drives)
    assert (done.exit_code, done.output.count("problem: drive")) == (1, 2)
    assert "no generation" in done.output


def test_a_torn_index_is_a_problem(drives) -> None:
    with Store.open(drives, owner=OWNER, direct=False) as store:
        run = store._transaction.current.index_runs[0]
    flip(drives[run.drive], run.block)
    done = check(*drives)
    assert done.exit_code == 1
    assert "index" in done.output
    assert done.output.count("│ whole") == 1


def test_sets_in_one_folder_are_checked_each(drives, tmp_path) -> None:
    other = tmp_path / "c.drive"
    options = {"drive_bytes": 64 * BLOCK_BYTES, "owner": "bert", "direct": False}
    Store.create([other], **options).close()
    done = check(tmp_path)
    assert (done.exit_code, done.output.count("set ")) == (0, 2)
    assert "'bert'" in done.output


def test_what_cannot_be_looked_at_is_refused(drives, tmp_path) -> None:
    text = tmp_path / "text"
    text.write_text("no drive" * 1000)
    empty = tmp_path / "empty"
    empty.mkdir()
    for arguments, reason in [
        ([text], "must begin with"),
        ([empty], "there is no drive"),
        ([drives[0]], "the set has 2 drives"),
        ([tmp_path / "nothing"], "no such file"),
        ([drives[0], drives[0]], "the set has 2 drives"),
        (["--queue-depth", "0", *drives], "queue_depth"),
    ]:
        done = check(*arguments)
        assert (done.exit_code, reason in done.output) == (2, True), done.output
    with Store.open(drives, owner=OWNER, direct=False):
        done = check(*drives)
    assert done.exit_code == 1
    assert "in use by" in done.output
    assert check().exit_code == 2


@pytest.mark.parametrize("at", [0, 8, 40, BLOCK_BYTES - 1])
@pytest.mark.parametrize("broken", [0, 1])
def test_a_broken_header_in_a_folder_is_named(drives, tmp_path, broken: int, at: int) -> None:
    flip(drives[broken], 0, at)
    done = check(tmp_path)
    assert done.exit_code == 2
    assert str(drives[broken]) in done.output
    assert str(drives[1 - broken]) not in done.output
    with pytest.raises(NotADriveError if at > 8 else StorageError) as caught:
        sets_of([tmp_path])
    if at:
        assert caught.value.path == str(drives[broken])
        return
    assert isinstance(caught.value, IncompleteSetError)
    assert (caught.value.expected, caught.value.actual) == (2, (1 - broken,))
    begin = bytes([MAGIC[0] ^ 1]) + MAGIC[1:]
    assert caught.value.others == {str(drives[broken]): begin}
    assert repr(begin) in done.output


def test_no_drive_is_left_in_a_folder(drives, tmp_path) -> None:
    for path in drives:
        path.write_bytes(bytes(len(path.read_bytes())))
    for number in range(MOST_OTHERS):
        (tmp_path / f"x{number}").write_text(str(number))
    with pytest.raises(NoDriveError) as caught:
        sets_of([tmp_path])
    assert caught.value.folder == str(tmp_path)
    assert caught.value.others == {
        **{str(path): bytes(8) for path in drives},
        **{str(tmp_path / f"x{number}"): b"%d" % number for number in range(MOST_OTHERS)},
    }
    done = check(tmp_path)
    assert done.exit_code == 2
    for part in [*map(str, drives), repr(MAGIC), "and 2 more files"]:
        assert part in done.output
    assert str(tmp_path / f"x{MOST_OTHERS - 1}") not in done.output


def test_help_says_what_an_exit_status_means() -> None:
    done = CliRunner().invoke(cli._app(), ["storage", "check", "--help"])
    assert done.exit_code == 0
    for word in ("Exit status", "Nothing is written", "--json"):
        assert word in done.output


def test_an_error_that_is_not_of_the_drives_is_raised() -> None:
    """Nothing was found to be whole where it could not be looked at."""
    places = [MemoryBlocks(image, at) for at, image in enumerate(memory_set(2))]
    with Store.open(places, owner=None) as store:
        store.add("p", 4 * BLOCK_BYTES)
        store.write("p", bytes(4 * BLOCK_BYTES))
        store.commit()
        place = store.tensors["p"].table.extent(0)
    images = [bytes(each.image) for each in places]

    def out_of_memory(action: str, block: int) -> None:
        if (action, block) == ("read", place.block):
            raise MemoryError("no room for it")

    whole = [MemoryBlocks(image, at) for at, image in enumerate(images)]
    assert check_drives(whole).whole
    failing = [MemoryBlocks(image, at) for at, image in enumerate(images)]
    failing[place.drive].fault = out_of_memory
    with pytest.raises(MemoryError):
        check_drives(failing)


def test_what_was_read_is_told(drives) -> None:
    told: list[int] = []
    report = check_drives(drives, direct=False, progress=told.append)
    assert report.whole
    shared = 6 * EXTENT  # is read once
    assert sum(told) == sum(each.nbytes for each in report.generations) - shared
