"""Drives that are files: made, opened, locked, refused."""

from __future__ import annotations

import errno
import gc
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from nearstep.errors import ArgumentError, OutOfBoundsError
from nearstep.storage.aligned import aligned_bytes
from nearstep.storage.blocks import BLOCK_BYTES, MEMORY, BlockFile, create_file, filesystem
from nearstep.storage.drive import DriveTransfer, flushes
from nearstep.storage.drive_errors import (
    ClosedStoreError,
    DirectIOError,
    DriveAccessError,
    DriveFullError,
    DriveLockedError,
    DriveSizeError,
    DriveVanishedError,
    ForeignDriveError,
    FormatVersionError,
    IncompleteSetError,
    NotADriveError,
    OwnerError,
    StorageError,
)
from nearstep.storage.drive_set import drives_in, open_set
from nearstep.storage.store import Store

SIZE = 64 * BLOCK_BYTES
OWNER = "gpt, job 7"


def made(folder: Path, count: int = 2, **options: object) -> list[Path]:
    paths = [folder / f"drive{number}" for number in range(count)]
    options = {"drive_bytes": SIZE, "owner": OWNER, "direct": False, **options}
    with Store.create(paths, **options) as store:
        store.add("p", 100)
        store.write("p", b"p" * 100)
        store.commit({"step": 1})
    return paths


def opened(paths: list[Path], **options: object) -> Store:
    return Store.open(paths, **{"owner": OWNER, "direct": False, **options})


def direct_folder(folder: Path) -> Path:
    """A folder whose filesystem takes O_DIRECT; where it does not, the test is skipped."""
    path = folder / "probe"
    path.write_bytes(bytes(BLOCK_BYTES))
    try:
        BlockFile(path).close()
    except DirectIOError as error:
        pytest.skip(f"O_DIRECT was not tested: {error}")
    return folder


def in_child(code: str, *arguments: object) -> subprocess.Popen[str]:
    """A process with this code, which has written a line when this returns."""
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_files_hold_what_was_committed(tmp_path) -> None:
    paths = made(tmp_path)
    assert [path.stat().st_size for path in paths] == [SIZE, SIZE]
    assert drives_in(tmp_path) == paths
    for order in (paths, paths[::-1]):
        with opened(order) as store:
            out = bytearray(100)
            store.read("p", out)
            assert (bytes(out), store.meta) == (b"p" * 100, {"step": 1})
            assert [drive.header.index for drive in store.drives] == [0, 1]


def test_o_direct_moves_the_same_bytes_at_any_depth(tmp_path) -> None:
    folder = direct_folder(tmp_path)
    rng = np.random.default_rng(1)
    data = rng.integers(0, 256, 5_000_001, np.uint8)
    for depth in (1, 8):
        paths = [folder / f"{depth}.{number}" for number in range(2)]
        with Store.create(
            paths, drive_bytes=8 << 20, owner=OWNER, extent_bytes=1 << 18, queue_depth=depth
        ) as store:
            store.add("p", data.nbytes)
            store.write("p", data)
            store.commit()
            assert sum(drive.bytes_written for drive in store.drives) > data.nbytes
        with Store.open(paths, owner=OWNER, queue_depth=depth) as store:
            out = np.zeros_like(data)
            store.read("p", out)
            assert (out == data).all()


@pytest.fixture
def loop_device(tmp_path: Path) -> Iterator[Path]:
    """A block device over a file; where none can be had, the test is skipped."""
    image = tmp_path / "image"
    image.write_bytes(bytes(2 * SIZE))
    try:
        done = subprocess.run(
            ["losetup", "--find", "--show", image], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or error
        pytest.skip(f"block devices were not tested: losetup: {reason}")
    name = done.stdout.strip()
    yield Path(name)
    subprocess.run(["losetup", "--detach", name], check=True)


def test_a_block_device_is_a_drive(loop_device) -> None:
    options = {"drive_bytes": SIZE, "owner": OWNER}
    with pytest.raises(NotADriveError, match="overwrite"):
        Store.create([loop_device], **options)
    with pytest.raises(DriveSizeError):
        Store.create([loop_device], **{**options, "drive_bytes": 4 * SIZE}, overwrite=True)
    data = np.random.default_rng(6).integers(0, 256, 100_001, np.uint8)
    with Store.create([loop_device], **options, overwrite=True) as store:
        store.add("p", data.nbytes)
        store.write("p", data)
        store.commit()
        with pytest.raises(DriveLockedError) as caught:
            Store.open([loop_device], owner=OWNER)
        assert caught.value.holder in (os.getpid(), None)
    out = np.zeros_like(data)
    with Store.open([loop_device], owner=OWNER) as store:
        store.read("p", out)
    assert (out == data).all()


def test_a_filesystem_in_memory_is_refused_unless_it_is_asked_for() -> None:
    folder = Path("/dev/shm")
    kind = ""
    if folder.is_dir():
        descriptor = os.open(folder, os.O_RDONLY)
        kind = filesystem(descriptor)
        os.close(descriptor)
        mounts = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
        assert kind == {fields[1]: fields[2] for fields in mounts}.get(str(folder), kind)
    if kind not in MEMORY:
        pytest.skip(f"/dev/shm is no filesystem in memory here: {kind or 'it is not there'}")
    path = folder / f"nearstep-test-{os.getpid()}"
    with pytest.raises(DirectIOError) as caught:
        Store.create([path], drive_bytes=SIZE, owner=OWNER)
    assert kind in str(caught.value)
    assert not path.exists()
    try:
        Store.create([path], drive_bytes=SIZE, owner=OWNER, direct=False).close()
        with pytest.raises(DirectIOError):
            Store.open([path], owner=OWNER)
    finally:
        path.unlink()


def test_what_is_no_drive_is_refused(tmp_path) -> None:
    text, empty, folder, pipe = (tmp_path / name for name in ("text", "empty", "folder", "pipe"))
    text.write_bytes(b"some notes, and nothing of drives" * 1000)
    empty.write_bytes(b"")
    folder.mkdir()
    os.mkfifo(pipe)
    for path in (text, empty, folder, pipe):
        with pytest.raises(NotADriveError) as caught:
            opened([path])
        assert str(path) in str(caught.value)
    before = text.read_bytes()
    with pytest.raises(NotADriveError):
        Store.create([text], drive_bytes=SIZE, owner=OWNER, direct=False)
    assert text.read_bytes() == before
    with pytest.raises(DriveVanishedError):
        opened([tmp_path / "nothing"])
    with pytest.raises(StorageError):
        drives_in(folder)
    with pytest.raises(StorageError):
        drives_in(tmp_path / "nothing")


def test_a_torn_header_and_another_version_are_refused(tmp_path) -> None:
    (path,) = made(tmp_path, 1)
    whole = path.read_bytes()
    for at in (20, 40, 200, BLOCK_BYTES - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(NotADriveError, match="torn"):
            opened([path])
    path.write_bytes(whole[:8] + b"\x09" + whole[9:])
    with pytest.raises(FormatVersionError) as caught:
        opened([path])
    assert (caught.value.expected, caught.value.actual) == (2, 9)
    assert "newer release" in str(caught.value)
    path.write_bytes(whole[:8] + b"\x01" + whole[9:])
    with pytest.raises(FormatVersionError, match="save its state") as caught:
        opened([path])
    assert (caught.value.expected, caught.value.actual) == (2, 1)


def test_a_drive_of_another_model_is_refused(tmp_path) -> None:
    paths = made(tmp_path)
    with pytest.raises(OwnerError) as caught:
        opened(paths, owner="bert")
    assert (caught.value.expected, caught.value.actual) == ("bert", OWNER)
    opened(paths, owner=None).close()
    long = "ä" * 5000
    other = tmp_path / "long"
    Store.create([other], drive_bytes=SIZE, owner=long, direct=False).close()
    opened([other], owner=long).close()
    with pytest.raises(OwnerError):
        opened([other], owner=long + "!")


def test_drives_of_different_sets_are_refused(tmp_path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    first, second = made(tmp_path / "a"), made(tmp_path / "b")
    with pytest.raises(ForeignDriveError) as caught:
        opened([first[0], second[1]])
    assert caught.value.path == str(second[1])
    with pytest.raises(IncompleteSetError) as caught:
        opened(first[:1])
    assert (caught.value.expected, caught.value.actual) == (2, (0,))
    copy = tmp_path / "copy"
    copy.write_bytes(first[0].read_bytes())
    with pytest.raises(IncompleteSetError) as caught:
        opened([first[0], copy])
    assert caught.value.actual == (0, 0)


def test_a_drive_that_was_cut_off_or_has_grown(tmp_path) -> None:
    (path,) = made(tmp_path, 1)
    os.truncate(path, SIZE + 5 * BLOCK_BYTES)
    opened([path]).close()  # what is behind the end is not used
    os.truncate(path, SIZE - BLOCK_BYTES)
    with pytest.raises(DriveSizeError) as caught:
        opened([path])
    assert (caught.value.expected, caught.value.actual) == (SIZE, SIZE - BLOCK_BYTES)


def test_a_drive_may_be_made_anew_on_request_alone(tmp_path) -> None:
    paths = made(tmp_path)
    with pytest.raises(NotADriveError):
        made(tmp_path)
    opened(paths).close()
    made(tmp_path, overwrite=True)
    with opened(paths) as store:
        assert store.generation == 1


def test_a_new_drives_size_and_name_are_flushed(tmp_path) -> None:
    flushed = []
    with mock.patch.object(os, "fsync", lambda fd: flushed.append(os.fstat(fd).st_ino)):
        create_file(path := tmp_path / "drive", SIZE)
    assert flushed == [path.stat().st_ino, tmp_path.stat().st_ino]


@pytest.mark.parametrize("fails", [0, 1])
def test_a_new_drive_that_cannot_be_flushed_is_not_made(tmp_path, fails: int) -> None:
    """Its size, or the folder's entry."""
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    path = tmp_path / "drive0"
    with (
        mock.patch.object(os, "fsync", mock.Mock(side_effect=[None] * fails + [error])),
        pytest.raises(DriveAccessError, match=f"{path}: cannot be created: Input") as caught,
    ):
        made(tmp_path, 1)
    assert caught.value.errno == errno.EIO
    assert not path.exists()


def test_drives_are_closed_once_each_whatever_the_system_says(tmp_path) -> None:
    """After an error the number of a descriptor may be another file's."""
    store, close, closed = opened(made(tmp_path)), os.close, []

    def fail(fd: int) -> None:
        close(fd)
        closed.append(fd)
        raise OSError(errno.EIO, f"descriptor {fd}")

    with mock.patch.object(os, "close", fail):
        with pytest.raises(OSError, match="descriptor") as caught:
            store.close()
        store.close()
    assert len(set(closed)) == len(closed) == 2
    assert caught.value.strerror == f"descriptor {closed[0]}"
    opened(sorted(tmp_path.iterdir())).close()  # unlocked


def test_a_drive_that_does_not_fit_is_not_made(tmp_path) -> None:
    path = tmp_path / "drive"
    with pytest.raises((DriveFullError, DriveAccessError)) as caught:
        create_file(path, 1 << 60)
    assert str(path) in str(caught.value)
    assert not path.exists()
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    with (
        mock.patch.object(os, "posix_fallocate", full),
        pytest.raises(DriveFullError, match=f"for {path}"),
    ):
        create_file(path, SIZE)
    assert not path.exists()
    with pytest.raises(DriveAccessError):
        create_file(tmp_path / "no" / "folder", SIZE)
    for bad in (0, 100, BLOCK_BYTES, -SIZE, True, SIZE + 0.5):
        with pytest.raises(ArgumentError):
            Store.create([path], drive_bytes=bad, owner=OWNER, direct=False)
    for places in ([], str(path), [5]):
        with pytest.raises(ArgumentError):
            Store.create(places, drive_bytes=SIZE, owner=OWNER, direct=False)
    with pytest.raises(ArgumentError):
        Store.create([path], drive_bytes=SIZE, owner="", direct=False)
    with pytest.raises(ArgumentError):
        Store.create([path], drive_bytes=1 << 63, owner=OWNER, direct=False)
    assert not path.exists()


def test_an_extent_that_no_header_can_say_is_refused_before_anything_is_touched(tmp_path) -> None:
    path = tmp_path / "drive"
    path.write_bytes(before := b"kept" * 20_000)
    options = {"drive_bytes": SIZE, "owner": OWNER, "overwrite": True, "direct": False}
    for bad in (1 << 32, 1 << 40, BLOCK_BYTES + 1, 0):
        with pytest.raises(ArgumentError, match="extent_bytes"):
            Store.create([path], **options, extent_bytes=bad)
        assert path.read_bytes() == before
    made(tmp_path, 1, extent_bytes=(1 << 32) - BLOCK_BYTES)


def test_what_was_there_before_outlasts_a_drive_that_cannot_be_made(tmp_path) -> None:
    """A pipe, a folder, a link to nothing; an empty file that somebody has, or that cannot grow."""
    pipe, folder, empty, link = (tmp_path / name for name in ("pipe", "folder", "empty", "link"))
    os.mkfifo(pipe)
    folder.mkdir()
    empty.write_bytes(b"")
    link.symlink_to(tmp_path / "nothing")
    there = sorted(tmp_path.iterdir())
    for overwrite in (False, True):
        options = {"drive_bytes": SIZE, "owner": OWNER, "direct": False, "overwrite": overwrite}
        for path in (pipe, folder):
            with pytest.raises(NotADriveError, match="regular file or a block device"):
                Store.create([path], **options)
        with pytest.raises(DriveAccessError):
            Store.create([link], **options)
        holder = BlockFile(empty, direct=False)
        with pytest.raises(DriveLockedError):
            Store.create([tmp_path / "new", empty], **options)
        holder.close()
        with pytest.raises((DriveFullError, DriveAccessError)):
            Store.create([tmp_path / "new", empty], **{**options, "drive_bytes": 1 << 60})
        assert sorted(tmp_path.iterdir()) == there
        assert empty.stat().st_size == 0
    assert create_file(empty, SIZE) is False
    assert create_file(tmp_path / "new", SIZE) is True


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a device node")
def test_a_device_node_that_is_no_block_device_outlasts_it(tmp_path) -> None:
    node = tmp_path / "null"
    try:
        os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(1, 3))
    except OSError as error:
        pytest.skip(f"no device node can be made here: {error}")
    with pytest.raises(NotADriveError):
        Store.create([node], drive_bytes=SIZE, owner=OWNER, direct=False)
    assert stat.S_ISCHR(node.stat().st_mode)


def test_a_drive_that_may_not_be_written_can_be_read(
    tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As for a user who is not root: to root every file can be written."""
    (path,) = made(tmp_path, 1)
    path.chmod(0o444)
    really = os.open

    def as_a_user(name: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return really(name, flags, mode)

    monkeypatch.setattr(os, "open", as_a_user)
    with pytest.raises(DriveAccessError) as caught:
        opened([path])
    assert caught.value.errno == errno.EACCES
    with opened([path], read_only=True) as store:
        out = bytearray(100)
        store.read("p", out)
        assert out == b"p" * 100


def test_a_drive_that_is_gone_is_not_committed_to(tmp_path) -> None:
    (path,) = made(tmp_path, 1)
    with opened([path]) as store:
        store.write("p", b"q" * 100)
        kept = tmp_path / "kept"
        path.rename(kept)
        with pytest.raises(DriveVanishedError):
            store.commit()
        path.write_bytes(b"")
        store.abort()
        store.write("p", b"q" * 100)
        with pytest.raises(DriveVanishedError, match="another file"):
            store.commit()
    with opened([kept]) as store:
        assert store.generation == 1


def test_a_drive_is_found_from_another_directory(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with Store.create(["a"], drive_bytes=64 * BLOCK_BYTES, owner=OWNER, direct=False) as store:
        monkeypatch.chdir("/")
        assert store.commit() == 1
        assert store.drives[0].name == "a"


HOLDER = """
import sys
from nearstep.storage.store import Store
store = Store.open(sys.argv[1:], owner=None, direct=False)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_drive_is_of_one_process_at_a_time(tmp_path) -> None:
    paths = made(tmp_path)
    child = in_child(HOLDER, *paths)
    for read_only in (False, True):
        with pytest.raises(DriveLockedError) as caught:
            opened(paths[::-1], read_only=read_only)
        assert caught.value.holder in (child.pid, None)
        assert caught.value.path == str(paths[1])
    with pytest.raises(DriveLockedError):
        made(tmp_path, overwrite=True)
    child.send_signal(signal.SIGKILL)
    child.wait()
    with opened(paths) as store:
        assert store.generation == 1
        with pytest.raises(DriveLockedError) as caught:
            opened(paths)
        assert caught.value.holder in (os.getpid(), None)


FORKED = """
import os, sys
from nearstep.storage.store import Store
from nearstep.storage.drive_errors import ClosedStoreError
store = Store.open(sys.argv[1:], owner=None, direct=False)
store.read("p", bytearray(100))
child = os.fork()
if not child:
    try:
        store.read("p", bytearray(100))
    except ClosedStoreError:
        print("ready", flush=True)
        sys.stdin.read()
        os._exit(0)
    os._exit(1)
store.read("p", bytearray(100))
store.write("p", b"r" * 100)
store.commit()
store.close()
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_child_does_not_use_the_drives_of_its_parent_nor_hold_them(tmp_path) -> None:
    """The parent ends its use; the child goes on, and the drives are free."""
    paths = made(tmp_path)
    child = in_child(FORKED, *paths)
    for _ in range(200):
        try:
            store = opened(paths)
        except DriveLockedError:
            threading.Event().wait(0.05)  # the parent is still at it
            continue
        break
    assert store.generation == 2
    store.close()
    child.communicate("")
    assert child.returncode == 0


FORKED_AT_WORK = """
import os, sys, threading
from nearstep.storage import blocks
from nearstep.storage.drive_errors import ClosedStoreError
from nearstep.storage.store import Store
print("ready", flush=True)
go = threading.Event()
def read(fd, parts, offset):
    go.wait()
    return os.preadv(fd, parts, offset)
store = Store.open(sys.argv[1:], owner=None, direct=False)
for drive in store.drives:
    drive.blocks._calls = blocks.Calls(preadv=read)
reading = store.submit_read("p", bytearray(100))
locked, done = threading.Event(), threading.Event()
def hold():
    with store._lock:
        locked.set()
        done.wait()
threading.Thread(target=hold, daemon=True).start()
locked.wait()
child = os.fork()
if not child:
    found = []
    read = lambda: store.read("p", bytearray(100))
    for action in (reading.wait, reading.join, read, store.abort):
        try:
            action()
        except ClosedStoreError as error:
            found.append(str(error))
    store.close()
    of = f"of process {os.getppid()}"
    os._exit(0 if len(found) == 4 and all(of in each for each in found) else 1)
ended = os.waitpid(child, 0)[1]
done.set()
go.set()
reading.wait()
store.close()
assert not ended, ended
"""


def test_a_child_is_told_at_once_that_a_transfer_of_its_parent_does_not_end_there(tmp_path) -> None:
    """Neither does it wait for the threads, nor for the lock that one of them has."""
    child = in_child(FORKED_AT_WORK, *made(tmp_path))
    try:
        child.communicate(timeout=60)  # below the bound on a wait without progress
    finally:
        child.kill()
    assert child.returncode == 0


def test_a_store_that_nobody_has_is_closed(tmp_path) -> None:
    paths = made(tmp_path)
    gc.collect()  # of other tests
    before = threading.active_count()
    store = opened(paths)
    store.read("p", bytearray(100))
    assert threading.active_count() > before
    del store
    gc.collect()
    assert threading.active_count() == before
    opened(paths).close()


def test_blocks_of_a_drive_can_be_moved_without_a_store(tmp_path) -> None:
    paths = made(tmp_path, 1, drive_bytes=4 << 20)
    (drive,) = open_set(paths, owner=OWNER, direct=False)
    data = np.random.default_rng(2).integers(0, 256, 600 * BLOCK_BYTES, np.uint8)
    for array in (data, aligned_bytes(data.nbytes)):
        array[:] = data
        transfer = drive.write(400, array)
        assert transfer.wait() is transfer
        assert (transfer.done, transfer.error, transfer.cycles) == (True, None, None)
        DriveTransfer("flush", flushes([drive])).begin().wait()
        for out in (np.zeros_like(data), aligned_bytes(data.nbytes)):
            drive.read(400, out).wait()
            assert (out == data).all()
    assert drive.bytes_written == 2 * data.nbytes
    assert drive.bytes_read == 4 * data.nbytes
    assert drive.flushes == 2
    for block, nbytes in ((-1, BLOCK_BYTES), (1023, 2 * BLOCK_BYTES)):
        with pytest.raises(OutOfBoundsError):
            drive.read(block, aligned_bytes(nbytes))
    with pytest.raises(ArgumentError):
        drive.read(0, aligned_bytes(100))
    drive.close()
    with pytest.raises(ClosedStoreError):
        drive.read(0, aligned_bytes(BLOCK_BYTES))
    for depth in (0, 257, True, 2.0):
        with pytest.raises(ArgumentError):
            open_set(paths, owner=OWNER, direct=False, queue_depth=depth)


def test_two_drives_work_at_once(tmp_path) -> None:
    """A read of each waits for the other one."""
    from nearstep_sim.models.drive import MemoryBlocks

    from .drives import memory_set

    both = threading.Barrier(2, timeout=20)
    places = [MemoryBlocks(image, at) for at, image in enumerate(memory_set(2))]
    with Store.open(places, owner=None, queue_depth=1) as store:
        store.add("p", 4 * BLOCK_BYTES)

        def meet(action: str, block: int) -> None:
            if action == "write":
                both.wait()

        for place in places:
            place.fault = meet
        store.write("p", bytes(4 * BLOCK_BYTES))
        assert [drive.bytes_written for drive in store.drives] == [2 * BLOCK_BYTES] * 2
