"""The drives in memory that storage is tested with."""

from __future__ import annotations

import random

import numpy as np
import pytest

from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES
from nearstep.storage.drive_errors import DriveIOError
from nearstep_sim.models.drive import (
    FailAt,
    Flush,
    Journal,
    MemoryBlocks,
    Write,
    after_cut,
    every_cut,
    unflushed,
)

SECTORS = BLOCK_BYTES // 512


def block(value: int, count: int = 1) -> np.ndarray:
    data = aligned_bytes(count * BLOCK_BYTES)
    data[:] = value
    return data


def test_what_was_flushed_stays_and_the_rest_as_is_said() -> None:
    journal = Journal()
    drives = [MemoryBlocks(bytes(4 * BLOCK_BYTES), number, journal) for number in range(2)]
    drives[0].write(0, block(1))
    drives[1].write(0, block(2))
    drives[0].flush()
    drives[0].write(1, block(3))
    drives[0].write(0, block(4))
    assert [type(event) for event in journal.events] == [Write, Write, Flush, Write, Write]
    assert unflushed(journal.events) == [1, 3, 4]
    images = [bytes(4 * BLOCK_BYTES)] * 2
    none = after_cut(images, journal.events, {})
    assert [image[0] for image in none] == [1, 0]
    assert none[0][BLOCK_BYTES] == 0
    some = after_cut(images, journal.events, {1: range(SECTORS), 4: [0]})
    assert (some[1][: BLOCK_BYTES + 1], some[0][0]) == (b"\2" * BLOCK_BYTES + b"\0", 4)
    assert (some[0][511], some[0][512], some[0][BLOCK_BYTES]) == (4, 1, 0)
    whole = dict.fromkeys(unflushed(journal.events), range(SECTORS))
    assert after_cut(images, journal.events, whole) == [bytes(each.image) for each in drives]


def test_every_subset_and_every_tear_are_tried_once() -> None:
    events = [Write(0, number, bytes(BLOCK_BYTES)) for number in range(3)]
    cuts = [
        tuple(sorted((at, tuple(sectors)) for at, sectors in kept.items()))
        for kept in every_cut(events, 8, random.Random(1))
    ]
    whole = tuple(range(SECTORS))
    subsets = {cut for cut in cuts if all(sectors == whole for _, sectors in cut)}
    assert len(subsets) >= 8
    torn = {cut for cut in cuts if cut and cut[-1][1] in [whole[:n] for n in range(1, SECTORS)]}
    assert len(torn) >= 7 * (SECTORS - 1)
    few = list(every_cut(events * 5, 20, random.Random(1)))
    assert 20 <= len(few) < 100


def test_a_fault_comes_once_at_its_time() -> None:
    drive = MemoryBlocks(bytes(4 * BLOCK_BYTES))
    drive.fault = FailAt("write", 1)
    drive.write(0, block(1))
    drive.read(0, block(0))
    with pytest.raises(DriveIOError):
        drive.write(1, block(1))
    drive.write(1, block(1))
    assert drive.fault.fired == 1
    assert bytes(drive.image) == b"\1" * 2 * BLOCK_BYTES + bytes(2 * BLOCK_BYTES)


def test_what_no_drive_would_take_is_found() -> None:
    drive = MemoryBlocks(bytes(4 * BLOCK_BYTES))
    for at, data in (
        (3, block(1, 2)),
        (-1, block(1)),
        (0, block(1)[:100]),
        (0, block(1, 2)[16:-16]),
    ):
        with pytest.raises(AssertionError):
            drive.write(at, data)
    drive.close()
    with pytest.raises(AssertionError):
        drive.read(0, block(1))
