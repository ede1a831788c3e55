"""Snapshots: of one version while reductions go on, whole or not there at all."""

from __future__ import annotations

import errno
import io
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from nearstep.backends.emulated import Injection
from nearstep.coarse import CoarsePool
from nearstep.coarse.errors import (
    SnapshotError,
    SnapshotSaveError,
    SnapshotSpaceError,
    TornSnapshotError,
)
from nearstep.errors import ArgumentError, BusyError, OutOfDeviceMemoryError
from nearstep.storage.snapshot_file import open_file
from nearstep_sim.coarse.pool_values import compare, reduced

from .conftest import (
    EVERY,
    URLS,
    deep_on_rtl,
    deep_on_tops,
    emulated,
    opened,
    random_arrays,
)


@pytest.fixture(params=EVERY)
def pool(request: pytest.FixtureRequest) -> Iterator[CoarsePool]:
    with opened(request.param) as each:
        yield each


def test_restored_as_it_was_saved(pool, tmp_path) -> None:
    first, second = random_arrays(pool, 5000, seed=1), random_arrays(pool, (3, 7), seed=2)
    tensors = [pool.tensor(first), pool.tensor(second)]
    path = pool.snapshot(tmp_path / "state", tensors)
    assert path == tmp_path / "state.000001"
    pool.all_reduce(tensors)
    assert pool.restore(tmp_path / "state", tensors) == tuple(tensors)
    assert compare(tensors[0], first) + compare(tensors[1], second) == 4 * (5000 + 21)
    new = pool.restore(path)
    assert [each.shape for each in new] == [(5000,), (3, 7)]
    assert compare(new[0], first) + compare(new[1], second) == 4 * (5000 + 21)


def test_reductions_that_go_on_leave_a_snapshot_as_it_was(pool) -> None:
    """Every page is changed on every device, some before and some after it is read."""
    arrays = random_arrays(pool, 20000, seed=1)
    tensor = pool.tensor(arrays)
    expected = [reduced(pool, arrays, "average")] * 4
    compared = 0
    with pool.freeze([tensor]) as frozen:
        for _ in range(3):
            event = pool.submit(tensor, "average")
            for device in range(pool.devices):
                values = frozen.read(0, device)
                np.testing.assert_array_equal(values.view("u4"), arrays[device].view("u4"))
                compared += values.size
            event.wait()
        assert all(device.pages_copied for device in pool.counters().devices)
    assert compared == 3 * 80000
    for _ in range(2):
        expected = [reduced(pool, expected, "average")] * 4
    assert compare(tensor, expected) == 80000


def test_a_page_copied_between_the_two_reads_is_taken_as_it_was_read(golden_pool) -> None:
    """The job overwrites it after its contents were read and before the copied-bits are."""
    pool = golden_pool
    arrays = random_arrays(pool, 4096, seed=3)
    tensor = pool.tensor(arrays)
    backend = pool.device.backend
    plain = backend.read_memory
    raced = []

    def read_memory(address, out) -> None:
        plain(address, out)
        if not raced:
            raced.append(address)
            for _ in range(2):  # the second result goes to the frozen place
                pool.all_reduce(tensor)

    with pool.freeze([tensor]) as frozen:
        backend.read_memory = read_memory
        for device in range(4):
            np.testing.assert_array_equal(frozen.read(0, device), arrays[device])
        del backend.read_memory
    assert raced
    assert tensor.read(0)[0] != arrays[0][0]


def test_a_write_of_the_host_copies_its_pages_too(pool) -> None:
    arrays = random_arrays(pool, 3000, seed=1)
    tensor = pool.tensor(arrays)
    with pool.freeze([tensor]) as frozen:
        tensor.write(1, np.zeros(3000, np.float32))
        assert np.all(tensor.read(1) == 0)
        np.testing.assert_array_equal(frozen.read(0, 1), arrays[1])


def test_saved_while_another_thread_reduces(pool, tmp_path) -> None:
    arrays = random_arrays(pool, 8000, seed=7)
    tensor = pool.tensor(arrays)
    versions = [arrays]
    for _ in range(6):
        versions.append([reduced(pool, versions[-1], "average")] * 4)
    failed: list[BaseException] = []

    def reduce() -> None:
        try:
            for _ in range(6):
                pool.all_reduce(tensor, "average")
        except BaseException as error:
            failed.append(error)
            raise

    thread = threading.Thread(target=reduce)
    thread.start()
    paths = [pool.snapshot(tmp_path / "live", [tensor]) for _ in range(3)]
    thread.join()
    assert not failed
    assert compare(tensor, versions[-1]) == 32000
    for path in paths:
        (saved,) = pool.restore(path)
        same = [
            all(np.array_equal(saved.read(d), version[d]) for d in range(4)) for version in versions
        ]
        saved.free()
        assert any(same), f"{path} is of no version"


@deep_on_tops
def test_generations_are_numbered_and_the_newest_is_loaded(pool, tmp_path) -> None:
    tensor = pool.tensor(random_arrays(pool, 10, seed=1))
    paths = []
    for value in range(3):
        for device in range(4):
            tensor.write(device, np.full(10, value, np.float32))
        paths.append(pool.snapshot(tmp_path / "g.h", [tensor]))
    assert [path.name for path in paths] == ["g.h.000001", "g.h.000002", "g.h.000003"]
    assert pool.restore(tmp_path / "g.h")[0].read(0)[0] == 2
    assert pool.restore(paths[0])[0].read(0)[0] == 0
    assert sorted(tmp_path.iterdir()) == paths, "nothing else is left"


def saved_twice(pool, tmp_path) -> tuple[Path, Path]:
    tensor = pool.tensor(random_arrays(pool, 300, seed=1))
    return tuple(pool.snapshot(tmp_path / "s", [tensor]) for _ in range(2))


@deep_on_tops
def test_a_torn_file_is_refused_wherever_it_ends(pool, tmp_path) -> None:
    good, torn = saved_twice(pool, tmp_path)
    whole = torn.read_bytes()
    tensor = pool.tensor(300)
    cuts = [0, 1, 16, 100, 200, len(whole) // 2, len(whole) - 32, len(whole) - 1]
    for cut in cuts:
        torn.write_bytes(whole[:cut])
        with pytest.raises(TornSnapshotError) as found:
            pool.restore(tmp_path / "s", [tensor])
        assert (found.value.path, found.value.last_good) == (torn, good)
        assert str(good) in str(found.value)
    assert compare(tensor, np.zeros(300, np.float32)) == 1200
    pool.restore(good, [tensor])


@deep_on_tops
def test_without_a_good_file_that_is_said(pool, tmp_path) -> None:
    for path in saved_twice(pool, tmp_path):
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(TornSnapshotError, match="there is no good one") as found:
        pool.restore(tmp_path / "s")
    assert found.value.last_good is None
    with pytest.raises(SnapshotError, match="cannot read"):
        pool.restore(tmp_path / "nothing")


class SmallDisk(io.BytesIO):
    """A file on a disk that is full after some bytes; the file itself is there."""

    def __init__(self, path: Path, space: int) -> None:
        super().__init__()
        path.touch()
        self._space = space

    def write(self, data) -> int:
        self._space -= len(data)
        if self._space < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super().write(data)


@deep_on_tops
@pytest.mark.parametrize(
    "space", [300, *(pytest.param(n, marks=pytest.mark.deep) for n in (0, 1000))]
)
def test_a_full_disk_leaves_no_file_and_the_one_before(pool, tmp_path, space) -> None:
    arrays = random_arrays(pool, 100, seed=1)
    tensor = pool.tensor(arrays)
    good = pool.snapshot(tmp_path / "s", [tensor])
    before, free = good.read_bytes(), pool.device.free_bytes
    with pytest.raises(SnapshotSaveError, match="No space left") as found:
        pool.snapshot(tmp_path / "s", [tensor], opener=lambda path: SmallDisk(path, space))
    assert found.value.errno == errno.ENOSPC
    assert [*tmp_path.iterdir()] == [good]
    assert good.read_bytes() == before
    assert pool.device.free_bytes == free
    pool.all_reduce(tensor)
    assert compare(tensor, reduced(pool, arrays)) == 400
    assert pool.snapshot(tmp_path / "s", [tensor]).name == "s.000002"
    pool.restore(good, [tensor])
    assert compare(tensor, arrays) == 400


def open_full() -> io.BufferedWriter:
    """A file of the system that takes nothing."""
    return io.BufferedWriter(io.FileIO("/dev/full", "wb"))


@deep_on_tops
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no /dev/full")
def test_a_disk_that_the_system_says_is_full(pool, tmp_path) -> None:
    tensor = pool.tensor(100)
    with pytest.raises(SnapshotSaveError) as found:
        pool.snapshot(tmp_path / "s", [tensor], opener=lambda _: open_full())
    assert found.value.errno == errno.ENOSPC
    assert not [*tmp_path.iterdir()]


@deep_on_tops
def test_a_folder_that_is_not_there(pool, tmp_path) -> None:
    with pytest.raises(SnapshotSaveError):
        pool.snapshot(tmp_path / "no" / "s", [pool.tensor(8)])


@deep_on_tops
def test_one_snapshot_at_a_time(pool) -> None:
    tensor = pool.tensor(8)
    free = pool.device.free_bytes
    with pool.freeze([tensor]) as frozen:
        with pytest.raises(SnapshotError, match="is open"), pool.freeze([tensor]):
            pass
        np.testing.assert_array_equal(frozen.read(0, 0), np.zeros(8))
    with pytest.raises(SnapshotError, match="closed"):
        frozen.read(0, 0)
    with pool.freeze([tensor]):
        pass
    assert pool.device.free_bytes == free


@pytest.mark.parametrize("write", [pytest.param(False, marks=pytest.mark.deep), True])
def test_a_copy_that_failed_is_reported(pool, write, tmp_path) -> None:
    """Where memory answers a copy other than OKAY; the reduction itself is not harmed."""
    arrays = random_arrays(pool, 5000, seed=1)
    tensor = pool.tensor(arrays)
    free = pool.device.free_bytes
    with pool.freeze([tensor]) as frozen:
        place = frozen.areas[2] if write else tensor.front(2)
        limit = place.address + place.nbytes
        injection = Injection(kind="slverr", write=write, base=place.address, limit=limit)
        if not write:
            pool.all_reduce(tensor)  # reads what is frozen, and writes it the next time
        emulated(pool).inject(injection)
        if write:
            pool.all_reduce(tensor)
        pool.all_reduce(tensor)
        np.testing.assert_array_equal(frozen.read(0, 1), arrays[1])
        with pytest.raises(SnapshotError, match="device 2 could not copy"):
            frozen.read(0, 2)
    emulated(pool).heal()
    expected = reduced(pool, [reduced(pool, arrays)] * 4)
    assert compare(tensor, expected) == 20000
    assert pool.device.free_bytes == free
    pool.snapshot(tmp_path / "s", [tensor])
    pool.all_reduce(tensor)
    pool.restore(tmp_path / "s", [tensor])
    assert compare(tensor, expected) == 20000


def test_a_snapshot_survives_a_reset(pool) -> None:
    arrays = random_arrays(pool, 5000, seed=1)
    tensor = pool.tensor(arrays)
    with pool.freeze([tensor]) as frozen:
        pool.submit(tensor)
        pool.reset()
        pool.all_reduce(tensor)
        pool.all_reduce(tensor)
        for device in range(4):
            np.testing.assert_array_equal(frozen.read(0, device), arrays[device])


@deep_on_rtl
def test_more_than_can_be_frozen(pool) -> None:
    far = [pool.tensor(8), pool.tensor(32000), pool.tensor(32000), pool.tensor(8)]
    with pytest.raises(SnapshotSpaceError, match="at most 64 pages"), pool.freeze([far[0], far[3]]):
        pass
    with pytest.raises(ArgumentError), pool.freeze([]):
        pass


def test_no_space_for_copies() -> None:
    with CoarsePool.open(URLS["golden"].replace("1MiB", "256KiB")) as pool:
        tensor = pool.tensor(25000)
        free = pool.device.free_bytes
        with pytest.raises(SnapshotSpaceError, match="no space for the copies"):
            pool.snapshot("nowhere", [tensor])
        assert pool.device.free_bytes == free


@deep_on_tops
def test_other_shapes_and_devices_are_refused(pool, tmp_path) -> None:
    path = pool.snapshot(tmp_path / "s", [pool.tensor(8)])
    with pytest.raises(SnapshotError, match="shapes"):
        pool.restore(path, [pool.tensor(9)])
    with (
        CoarsePool.open("golden:coarse?devices=3&memory_bytes=64KiB") as other,
        pytest.raises(SnapshotError, match="3 devices, not 4"),
    ):
        other.restore(path)
    tensor = pool.tensor(20000)
    event = pool.submit(tensor)
    with pytest.raises(BusyError):
        pool.restore(path, [tensor])
    event.wait()


def test_tensors_that_do_not_fit_leave_no_memory_behind(tmp_path) -> None:
    with CoarsePool.open("golden:coarse?devices=2&memory_bytes=4MiB") as large:
        path = large.snapshot(tmp_path / "s", [large.tensor(60000) for _ in range(3)])
    with CoarsePool.open("golden:coarse?devices=2&memory_bytes=1MiB") as small:
        free = small.device.free_bytes
        with pytest.raises(OutOfDeviceMemoryError):
            small.restore(path)
        assert small.device.free_bytes == free


def test_two_that_save_under_one_name_keep_each_others_files(golden_pool, tmp_path) -> None:
    arrays = [random_arrays(golden_pool, 50, seed=seed) for seed in (1, 2)]
    tensors = [golden_pool.tensor(each) for each in arrays]
    with CoarsePool.open(URLS["golden"]) as other:
        there = other.tensor(arrays[1])
        inner = []

        def opener(path):
            inner.append(other.snapshot(tmp_path / "s", [there]))
            return open_file(path)

        outer = golden_pool.snapshot(tmp_path / "s", [tensors[0]], opener=opener)
    assert {outer, *inner} == {*tmp_path.iterdir()}
    assert len({outer, *inner}) == 2
    compared = 0
    for path, expected in ((outer, arrays[0]), (inner[0], arrays[1])):
        (found,) = golden_pool.restore(path)
        compared += compare(found, expected)
    assert compared == 400


def test_files_and_folders_of_like_names_are_none_of_its(golden_pool, tmp_path) -> None:
    arrays = random_arrays(golden_pool, 50, seed=1)
    tensor = golden_pool.tensor(arrays)
    (tmp_path / "s").write_text("notes")
    (tmp_path / "s.000002").mkdir()
    first, second = (golden_pool.snapshot(tmp_path / "s", [tensor]) for _ in range(2))
    assert [first.name, second.name] == ["s.000001", "s.000003"]
    golden_pool.all_reduce(tensor)
    golden_pool.restore(tmp_path / "s", [tensor])
    assert compare(tensor, arrays) == 200
    copy = tmp_path / "kept"
    copy.write_bytes(first.read_bytes())
    golden_pool.all_reduce(tensor)
    golden_pool.restore(copy, [tensor])
    assert compare(tensor, arrays) == 200
