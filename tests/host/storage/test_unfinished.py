"""What is left of a set that was being made is told from one that has a generation to lose."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_errors import DriveLockedError
from nearstep.storage.drive_set import create_set
from nearstep.storage.store import Store
from nearstep.storage.unfinished import unfinished
from nearstep_sim.models.drive import Journal, MemoryBlocks, after_cut, every_cut

BLOCKS = 12
BLANK = bytes(BLOCKS * BLOCK_BYTES)


def placed(folder: Path, images: Sequence[bytes | None]) -> list[Path]:
    """Files with these contents, but for None."""
    places = [folder / f"drive{number}" for number in range(len(images))]
    for place, image in zip(places, images, strict=True):
        place.unlink(missing_ok=True)
        if image is not None:
            place.write_bytes(image)
    return places


def made(count: int, *, commits: int = 0) -> list[bytes]:
    """Drives with so many generations besides the first."""
    blocks = [MemoryBlocks(BLANK, each) for each in range(count)]
    create_set(blocks, drive_bytes=len(BLANK), owner="a test", extent_bytes=BLOCK_BYTES)
    with Store.open(blocks, owner="a test") as store:
        if commits:
            store.add("a tensor", 100)
        for number in range(commits):
            store.write("a tensor", np.full(100, number, np.uint8))
            store.commit()
        if not commits:  # what was written counts for nothing
            store.add("a tensor", 100)
            store.write("a tensor", np.ones(100, np.uint8))
    return [bytes(each.image) for each in blocks]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_set_that_is_cut_off_anywhere_while_it_is_made(count: int, tmp_path: Path) -> None:
    journal = Journal()
    blocks = [MemoryBlocks(BLANK, each, journal) for each in range(count)]
    create_set(blocks, drive_bytes=len(BLANK), owner="a test", extent_bytes=BLOCK_BYTES)
    rng, cuts = random.Random(51), 0
    print("seed 51")
    for at in range(len(journal.events) + 1):
        for kept in every_cut(journal.events[:at], 4, rng):
            images = after_cut([BLANK] * count, journal.events[:at], kept)
            places = placed(tmp_path, images)
            assert unfinished(places) == places, (at, kept)
            while places:  # and while it is removed
                places.pop().unlink()
                assert unfinished([tmp_path / f"drive{i}" for i in range(count)]) == places
            cuts += 1
    assert cuts > 20


def test_files_that_have_not_their_size_yet_or_are_not_all_there(tmp_path: Path) -> None:
    for images in ([b"", None], [BLANK, None], [BLANK, b""], [BLANK, BLANK[:5000]], [b"", BLANK]):
        places = placed(tmp_path, images)
        there = [place for place, image in zip(places, images, strict=True) if image is not None]
        assert unfinished(places) == there
    assert unfinished(placed(tmp_path, [None, None])) == []


def test_drives_that_were_never_committed_to(tmp_path: Path) -> None:
    places = placed(tmp_path, made(2))
    assert unfinished(places) == places
    with Store.open(places, owner="a test", direct=False), pytest.raises(DriveLockedError):
        unfinished(places)


def changed(image: bytes, block: int, data: bytes) -> bytes:
    return image[: block * BLOCK_BYTES] + data + image[block * BLOCK_BYTES + len(data) :]


def test_whatever_may_be_a_loss_is_none(tmp_path: Path) -> None:
    zeros = bytes(BLOCK_BYTES)
    (a, b), (other, _) = made(2, commits=1), made(2)
    new, last = made(2)
    letter = b"a letter".ljust(len(BLANK), b"!")
    cases: list[list[bytes | None]] = [
        [a, b],
        made(2, commits=3),
        [changed(a, 0, zeros), b],  # its header was lost
        [changed(a, 0, zeros), None],
        [changed(a, 0, zeros * 3), None],
        [changed(a, 1, letter[: 2 * BLOCK_BYTES]), b],  # both superblocks
        [changed(changed(new, 1, zeros * 2), BLOCKS - 2, zeros * 2), last],  # all copies
        [None, b],
        [other, last],  # of two sets
        [new[: 5 * BLOCK_BYTES], last],
        [letter, None],
        [new, letter],
        [changed(BLANK, 4, b"x"), None],
        [BLANK, changed(BLANK, 11, b"x")],
        [changed(BLANK, 0, b"xxxxxxxx"), None],
    ]
    for number, images in enumerate(cases):
        places = placed(tmp_path, images)
        assert unfinished(places) == [], number
    folder = tmp_path / "folder"
    folder.mkdir()
    assert unfinished([folder]) == []
