"""Drives that fail, and blocks that are not what was written."""

from __future__ import annotations

import errno
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES, BlockFile, Calls
from nearstep.storage.check import check_drives
from nearstep.storage.drive_errors import (
    ClosedStoreError,
    DamagedSuperblockWarning,
    DriveFullError,
    DriveIOError,
    DriveTimeoutError,
    DriveVanishedError,
    FailedGenerationError,
    NoGenerationError,
    NotADriveError,
    ShortTransferError,
    TornExtentError,
    TornIndexError,
    UncertainCommitError,
)
from nearstep.storage.store import Store
from nearstep.storage.superblock import SLOTS, copies
from nearstep_sim.models.drive import FailAt, MemoryBlocks

from .drives import (
    EXTENT,
    OWNER,
    contents,
    images_of,
    memory_set,
    open_images,
    random_bytes,
    reopened,
)

NBYTES = 3 * EXTENT + 50


def two_generations() -> tuple[list[bytes], bytes, bytes]:
    """Images of drives, and what the tensor `p` is in generations 1 and 2."""
    rng = np.random.default_rng(3)
    store, places = open_images(memory_set(2, 32))
    old = random_bytes(rng, NBYTES)
    store.add("p", NBYTES)
    store.write("p", old)
    store.commit({"step": 1})
    new = random_bytes(rng, NBYTES)
    store.write("p", new)
    store.commit({"step": 2})
    store.close()
    return images_of(places), old, new


@pytest.mark.parametrize("code", [errno.EIO, errno.ENODEV])
def test_a_write_that_fails_keeps_the_generation_from_being_committed(code: int) -> None:
    images, _, new = two_generations()
    expected = DriveVanishedError if code == errno.ENODEV else DriveIOError
    for number in range(4):
        store, places = open_images(images, queue_depth=1)
        places[number % 2].fault = FailAt("write", number // 2, code)
        with pytest.raises(expected):
            store.write("p", bytes(NBYTES))
        for action in (
            lambda store=store: store.commit(),
            lambda store=store: store.write("p", b"x"),
            lambda store=store: store.read("p", bytearray(1)),
        ):
            with pytest.raises(FailedGenerationError) as caught:
                action()
            assert isinstance(caught.value.__cause__, expected)
        free = store.free_bytes
        store.abort()
        assert store.free_bytes > free
        assert contents(store) == {"p": new}
        store.write("p", b"again")  # the drive is well again
        store.commit()
        assert contents(reopened(places)) == {"p": b"again" + new[5:]}


def test_an_error_of_a_read_is_raised_and_nothing_is_lost() -> None:
    images, _, new = two_generations()
    store, places = open_images(images)
    places[1].fault = FailAt("read")
    with pytest.raises(DriveIOError) as caught:
        store.read("p", bytearray(NBYTES))
    assert (caught.value.action, caught.value.errno) == ("read", errno.EIO)
    assert caught.value.why == os.strerror(errno.EIO)
    assert contents(store) == {"p": new}


def test_a_read_behind_a_write_that_fails_returns_no_older_bytes() -> None:
    store, places = open_images(memory_set(1, 32), queue_depth=1)
    store.add("p", 5)
    store.write("p", b"first")
    go_on = threading.Event()

    def fail_late(action: str, block: int) -> None:
        if action == "write":
            go_on.wait(30)
            raise DriveIOError("memory", action, block, OSError(errno.EIO, "late"))

    places[0].fault = fail_late
    transfer = store.submit_write("p", b"later")  # to the same blocks
    threading.Timer(0.05, go_on.set).start()
    with pytest.raises(FailedGenerationError):
        store.read("p", bytearray(5))
    assert isinstance(transfer.error, DriveIOError)


def test_a_part_that_cannot_read_the_rest_fails() -> None:
    images, _, new = two_generations()
    store, places = open_images(images)
    places[store.tensors["p"].table.extent(0).drive].fault = FailAt("read")
    with pytest.raises(DriveIOError):
        store.write("p", b"x", 100)
    store.abort()
    assert contents(store) == {"p": new}


@pytest.mark.parametrize("action", ["flush", "look"])
@pytest.mark.parametrize("drive", [0, 1])
def test_a_flush_that_fails_keeps_the_generation_from_being_committed(
    action: str, drive: int
) -> None:
    images, _, new = two_generations()
    store, places = open_images(images)
    store.write("p", bytes(NBYTES))
    places[drive].fault = FailAt(action)
    with pytest.raises(DriveIOError):
        store.commit()
    with pytest.raises(FailedGenerationError):  # a second flush may lie
        store.commit()
    assert contents(reopened(places)) == {"p": new}
    store.abort()
    store.write("p", b"z")
    assert store.commit() == 3
    assert contents(reopened(places)) == {"p": b"z" + new[1:]}


@pytest.mark.parametrize(("action", "number", "there"), [("write", 1, 2), ("flush", 1, 3)])
def test_a_commit_whose_last_write_fails_is_in_doubt(action: str, number: int, there: int) -> None:
    images, _, new = two_generations()
    store, places = open_images(images, queue_depth=1)
    store.write("p", b"z", 0)
    places[0].fault = FailAt(action, number)
    with pytest.raises(UncertainCommitError) as caught:
        store.commit()
    assert caught.value.generation == 3
    with pytest.raises(ClosedStoreError):
        store.read("p", bytearray(1))
    store = reopened(places)
    assert store.generation == there
    assert contents(store) == {"p": new if there == 2 else b"z" + new[1:]}


def reads_torn(store: Store, path: str, block: int) -> bool:
    """Whether `p` cannot be read; then the error names the extent that has the block."""
    try:
        contents(store)
    except TornExtentError as error:
        torn = error
    else:
        return False
    extent = store.tensors["p"].table.extent(torn.extent)
    assert (torn.tensor, torn.path) == ("p", path)
    assert extent.block <= block < extent.block + extent.blocks
    assert (torn.generation, torn.whole) == (2, (1,))
    return True


def test_every_flipped_block_is_found_and_named() -> None:
    """A bit in each block of both drives, in turn: what is read is right, or an error."""
    images, old, new = two_generations()
    rng = np.random.default_rng(1)
    found = dict.fromkeys(["same", "extent", "index", "warned", "noted", "header"], 0)
    for drive in range(2):
        for block in range(len(images[drive]) // BLOCK_BYTES):
            damaged = [bytearray(image) for image in images]
            at = block * BLOCK_BYTES + int(rng.integers(0, 64))  # bytes that every block has
            damaged[drive][at] ^= 1 << int(rng.integers(0, 8))
            damaged = [bytes(image) for image in damaged]
            try:
                with warnings.catch_warnings(record=True) as warned:
                    warnings.simplefilter("always")
                    store, places = open_images(damaged)
            except (NotADriveError, TornIndexError) as error:
                torn = error
            else:
                torn = None
                assert store.generation == 2
            if isinstance(torn, NotADriveError):
                assert block == 0
                found["header"] += 1
            elif isinstance(torn, TornIndexError):
                assert (torn.generation, torn.whole) == (2, (1,))
                assert contents(open_images(damaged, generation=1)[0]) == {"p": old}
                found["index"] += 1
            elif reads_torn(store, places[drive].name, block):
                assert contents(store, 1) == {"p": old}
                found["extent"] += 1
            else:
                assert contents(store) == {"p": new}
                found["warned" if warned else "noted" if store.notes else "same"] += 1
    assert found["header"] == 2
    assert found["warned"] == 2
    assert found["noted"] == 3  # what a power cut leaves, and the index of generation 1
    assert found["index"] == 1
    assert found["extent"] == 7  # three extents of two blocks, and one
    assert sum(found.values()) == 64


def three_generations() -> tuple[list[bytes], dict[int, bytes], dict[int, tuple[int, int]]]:
    """Images of drives with two generations and a kept one; what `p` is in each; and drive and
    block of each index."""
    rng = np.random.default_rng(4)
    store, places = open_images(memory_set(2, 64))
    data, indices = {}, {}
    store.add("p", NBYTES)
    for number in (1, 2, 3):
        data[number] = random_bytes(rng, NBYTES)
        store.write("p", data[number])
        assert store.commit({"step": number}, name="best" if number == 1 else "") == number
        (run,) = store.superblock.runs
        indices[number] = run.drive, run.block
    store.close()
    return images_of(places), data, indices


def with_bad_block(
    images: Sequence[bytes], place: tuple[int, int], *, rots: bool
) -> list[MemoryBlocks]:
    """Drives of which one block is rotten, or cannot be read."""
    drives = [MemoryBlocks(image, at) for at, image in enumerate(images)]
    drive, block = place
    if rots:
        drives[drive].image[block * BLOCK_BYTES + 100] ^= 1

    def fault(action: str, at: int) -> None:
        if not rots and (action, at) == ("read", block):
            raise DriveIOError("memory", action, at, OSError(errno.EIO, "I/O"))

    drives[drive].fault = fault
    return drives


@pytest.mark.parametrize("rots", [True, False])
@pytest.mark.parametrize("torn", [1, 2, 3])
def test_an_index_that_cannot_be_read_costs_no_other_generation(torn: int, rots: bool) -> None:
    images, data, indices = three_generations()
    reason = f"generation {torn}: " + ("CRC-32 of its" if rots else "its index cannot be read")
    report = check_drives(with_bad_block(images, indices[torn], rots=rots))
    problems = {each.number: each.problems for each in report.generations}
    assert problems.pop(torn)[0].startswith(reason)
    assert (report.problems, sorted(problems.items())) == ([], [(n, []) for n in data if n != torn])
    if torn == 3:
        with pytest.raises(TornIndexError, match=reason) as caught:
            Store.open(with_bad_block(images, indices[torn], rots=rots), owner=OWNER)
        assert caught.value.whole == (2,)
    places = with_bad_block(images, indices[torn], rots=rots)
    with Store.open(places, owner=OWNER, generation=2 if torn == 3 else 3) as store:
        if torn != 3:
            assert [each.startswith(reason) for each in store.notes] == [True]
        assert {*store.generations, *store.kept.values()} == {1, 2, 3} - ({torn} - {1})
        assert all(contents(store, n) == {"p": data[n]} for n in data if n != torn)


@pytest.mark.parametrize("rots", [True, False])
def test_a_kept_generation_without_an_index_frees_its_blocks_and_costs_no_other_one(
    rots: bool,
) -> None:
    images, data, indices = three_generations()
    places = with_bad_block(images, indices[1], rots=rots)
    with Store.open(places, owner=OWNER) as store:
        for use in (lambda: store.at(1), lambda: store.restore("best")):
            with pytest.raises(TornIndexError, match="there is generation 2, 3") as caught:
                use()
            assert caught.value.generation == 1
        size = store.free_bytes - 6 * EXTENT
        store.add("fills", size)
        store.write("fills", b"f" * size)  # over blocks of the kept one
        data[4] = bytes(NBYTES)
        store.write("p", data[4])
        assert (store.commit(), store.kept) == (4, {"best": 1})
    images = images_of(places)  # without the error of the sector
    for number in (4, 3):
        store = reopened(places, generation=number)
        assert sorted(store.generations) == [3, 4]
        assert all(contents(store, each)["p"] == data[each] for each in (3, 4))
        with pytest.raises(TornIndexError, match="CRC-32" if rots else "has blocks of it"):
            store.at(1)
    store = reopened(places)
    store.drop("best")
    for _ in range(2):
        store.commit()
        assert not store.kept
    assert (reopened(store).notes, contents(reopened(store))["p"]) == ([], data[4])


def opened_with_warning(images: list[bytes], faults: dict[int, FailAt]) -> tuple[Store, str]:
    """A store of which drives have faults while it is opened, and the only warning."""
    places = [MemoryBlocks(image, at) for at, image in enumerate(images)]
    for drive, fault in faults.items():
        places[drive].fault = fault
    with pytest.warns(DamagedSuperblockWarning) as caught:
        store = Store.open(places, owner=OWNER)
    (warning,) = caught
    return store, str(warning.message)


@pytest.mark.parametrize("generation", [1, 2])
@pytest.mark.parametrize("copy", [0, 1])
def test_a_rotten_sector_of_a_superblock_costs_no_step(generation: int, copy: int) -> None:
    """It is named with both generations, and written anew."""
    images, old, new = two_generations()
    slot = SLOTS[generation % 2 == 1]  # generation 0 was in the first
    block = copies(slot, 32)[copy]

    def rotten(action: str, at: int) -> None:
        if action == "read" and at == block:
            raise DriveIOError("memory", action, at, OSError(errno.EIO, "rotten"))

    store, message = opened_with_warning(images, {0: rotten})
    for part in (f"superblock {slot}", f"block {block}", "generation 1 and 2", "nothing is lost"):
        assert part in message
    assert (contents(store), contents(store, 1)) == ({"p": new}, {"p": old})
    for at in range(8):  # a flipped bit, by any open or check
        damaged = bytearray(images[0])
        damaged[block * BLOCK_BYTES + 30] ^= 1 << at
        report = check_drives([MemoryBlocks(bytes(damaged)), MemoryBlocks(images[1], 1)])
        named = [*report.problems, *report.notes]
        assert len(named) == 1
        assert f"block {block}" in named[0]
        assert [each.number for each in report.generations] == [2, 1]
        with warnings.catch_warnings(record=True):
            store, places = open_images([bytes(damaged), images[1]])
        assert contents(store) == {"p": new}
        store.close()
        assert images_of(places) == images  # mended
    store, _ = open_images(images)
    for number in range(3, 6):
        store.write("p", bytes([number]) * NBYTES)
        assert store.commit() == number


@pytest.mark.parametrize("generation", [1, 2])
def test_both_copies_of_a_superblock_lost_are_said(generation: int) -> None:
    images, old, new = two_generations()
    slot = SLOTS[generation % 2 == 1]
    damaged = bytearray(images[0])
    for at in copies(slot, 32):
        damaged[at * BLOCK_BYTES + 50] ^= 1
    damaged = [bytes(damaged), images[1]]
    store, message = opened_with_warning(damaged, {})
    other = 3 - generation
    assert f"perhaps {other + 1}" in message
    assert f"there is generation {other}" in message
    assert contents(store) == {"p": old if other == 1 else new}
    report = check_drives([MemoryBlocks(image, at) for at, image in enumerate(damaged)])
    assert not report.whole
    assert report.problems == [message]


def commits_with_lost_writes(blocks: Sequence[int], commits: int) -> tuple[list[bytes], bytes]:
    """Drives after more commits, of which every write to these blocks was acknowledged and lost;
    and what was written last."""
    images, _, data = two_generations()
    store, places = open_images(images)
    places[0].caches = False
    places[0].lie = lambda action, block: None if (action, block) in lost else block
    lost = {("write", block) for block in blocks}
    for number in range(commits):
        data = bytes([number]) * EXTENT + data[EXTENT:]
        store.write("p", data[:EXTENT])
        assert store.commit() == 3 + number
    store.close()
    return images_of(places), data


def test_a_lost_write_of_a_superblock_is_said_and_costs_no_step() -> None:
    images, data = commits_with_lost_writes(SLOTS[1:], 1)
    store, message = opened_with_warning(images, {})
    assert f"block {SLOTS[1]}: it is of generation 1" in message
    assert "nothing is lost" in message
    assert (store.generation, contents(store)) == (3, {"p": data})
    report = check_drives([MemoryBlocks(image, at) for at, image in enumerate(images)])
    assert report.problems == [message]
    reopened(store)  # mended: no warning


def test_a_generation_that_a_later_one_overwrote_costs_no_step() -> None:
    """Both copies of superblock 3 are lost: that of generation 1 still names its blocks."""
    images, data = commits_with_lost_writes(copies(SLOTS[1], 32), 2)
    store, _ = open_images(images)
    assert (store.generation, contents(store)) == (4, {"p": data})
    assert [*store.generations] == [4]
    (note,) = store.notes
    assert note.startswith("generation 1: generation 4 has blocks of it")
    store.write("p", data)
    assert store.commit() == 5


def test_a_second_copy_that_cannot_be_written_is_said_and_the_commit_counts() -> None:
    images, _, _ = two_generations()
    store, places = open_images(images, queue_depth=1)
    store.write("p", bytes(NBYTES))
    places[0].fault = FailAt("write", 2)  # behind the index and the first copy
    with pytest.warns(DamagedSuperblockWarning, match="there is generation 3"):
        assert store.commit() == 3
    assert contents(reopened(places)) == {"p": bytes(NBYTES)}


@pytest.mark.filterwarnings("ignore::nearstep.storage.drive_errors.DamagedSuperblockWarning")
def test_without_any_superblock_there_is_an_error() -> None:
    images, _, _ = two_generations()
    damaged = bytearray(images[0])
    damaged[BLOCK_BYTES : 3 * BLOCK_BYTES] = b"\xaa" * 2 * BLOCK_BYTES
    assert open_images([bytes(damaged), images[1]])[0].generation == 2
    damaged[-2 * BLOCK_BYTES :] = b"\xaa" * 2 * BLOCK_BYTES
    with pytest.raises(NoGenerationError) as caught:
        open_images([bytes(damaged), images[1]])
    assert "CRC-32" in str(caught.value)


def test_an_older_drive_of_the_set_is_found_by_its_blocks() -> None:
    """A copy of one drive from before is put in: no mixture is read."""
    store, places = open_images(memory_set(2, 32))
    store.add("p", NBYTES)
    rng = np.random.default_rng(4)
    images = []
    for _ in range(4):
        store.write("p", random_bytes(rng, NBYTES))
        store.commit()
        images.append(images_of(places))
    mixed, _ = open_images([images[3][0], images[0][1]])
    with pytest.raises(TornExtentError):
        mixed.read("p", bytearray(NBYTES))


def test_a_drive_that_hangs_is_given_up() -> None:
    images, _, _ = two_generations()
    store, places = open_images(images, timeout_s=0.05, queue_depth=1)
    go_on, hung = threading.Event(), list[int]()

    def hang(action: str, block: int) -> None:
        hung.append(block)
        go_on.wait(30)

    places[0].fault = hang
    transfer = store.submit_read("p", bytearray(NBYTES))
    with pytest.raises(DriveTimeoutError) as caught:
        transfer.wait()
    assert caught.value.waited_for == "read of 'p'"
    assert not transfer.ended
    assert transfer.error is None
    assert len(hung) == 1, "it has made no progress"
    go_on.set()
    store.close()
    assert transfer.done


class Moves:
    """Calls of the system that do what they are told: a number of bytes, or an error.

    What was `asked` for are offsets and numbers of bytes.
    """

    def __init__(self, *results: int | OSError) -> None:
        self.results = list(results)
        self.asked: list[tuple[int, int]] = []

    def __call__(self, fd: int, data: list[np.ndarray], offset: int) -> int:
        self.asked.append((offset, data[0].nbytes))
        result = self.results.pop(0)
        if isinstance(result, OSError):
            raise result
        return result


@pytest.fixture
def file_of(tmp_path: Path) -> Iterator[Callable[..., BlockFile]]:
    """Open a file of eight blocks as a drive, with other calls of the system."""
    path = tmp_path / "drive"
    path.write_bytes(bytes(8 * BLOCK_BYTES))
    with ExitStack() as stack:

        def opened(**calls: Callable[..., object]) -> BlockFile:
            blocks = BlockFile(path, direct=False, calls=Calls(**calls))
            stack.callback(blocks.close)
            return blocks

        yield opened


@pytest.mark.parametrize(
    "blocks_moved", [[1, 1, 1], [2, 1], [1, 2], [3]], ids=lambda moved: "+".join(map(str, moved))
)
def test_a_write_goes_on_where_the_system_stopped(file_of, blocks_moved: list[int]) -> None:
    moves = Moves(*(count * BLOCK_BYTES for count in blocks_moved))
    file_of(pwritev=moves).write(2, aligned_bytes(3 * BLOCK_BYTES))
    begins = [2 + sum(blocks_moved[:at]) for at in range(len(blocks_moved))]
    assert moves.asked == [(at * BLOCK_BYTES, (5 - at) * BLOCK_BYTES) for at in begins]


@pytest.mark.parametrize(
    ("results", "expected"),
    [
        ([0], ShortTransferError),
        ([BLOCK_BYTES, 0], ShortTransferError),
        ([100], ShortTransferError),
        ([OSError(errno.EIO, "I/O")], DriveIOError),
        ([OSError(errno.ENOSPC, "full")], DriveFullError),
        ([OSError(errno.EDQUOT, "quota")], DriveFullError),
        ([OSError(errno.ENODEV, "gone")], DriveVanishedError),
        ([BLOCK_BYTES, OSError(errno.ENXIO, "gone")], DriveVanishedError),
    ],
)
def test_a_write_that_the_system_does_not_end_is_an_error(file_of, results, expected) -> None:
    moves = Moves(*results)
    blocks = file_of(pwritev=moves)
    with pytest.raises(expected) as caught:
        blocks.write(2, aligned_bytes(3 * BLOCK_BYTES))
    assert blocks.name in str(caught.value)
    assert len(moves.asked) == len(results)
    if expected is ShortTransferError:
        assert caught.value.expected == 3 * BLOCK_BYTES
        assert caught.value.actual == sum(results)


def test_a_file_that_is_cut_off_while_it_is_open_reads_short(file_of, tmp_path) -> None:
    blocks = file_of()
    os.truncate(tmp_path / "drive", 3 * BLOCK_BYTES)
    with pytest.raises(ShortTransferError) as caught:
        blocks.read(2, aligned_bytes(2 * BLOCK_BYTES))
    assert (caught.value.expected, caught.value.actual) == (2 * BLOCK_BYTES, BLOCK_BYTES)


def test_a_flush_that_fails_is_an_error_of_the_drive(file_of) -> None:
    def fail(fd: int) -> None:
        raise OSError(errno.EIO, "I/O")

    with pytest.raises(DriveIOError) as caught:
        file_of(fdatasync=fail).flush()
    assert caught.value.action == "flush"
