"""The functions of the AXDIMM paper, by their names."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import nearstep
from nearstep.axdimm.runtime import Axdimm, Place, Pointer
from nearstep.errors import (
    ArgumentError,
    ClosedDeviceError,
    MismatchError,
    ModeError,
    OutOfBoundsError,
    OutOfDeviceMemoryError,
    OverlapError,
)
from nearstep.storage.drive_errors import DriveFullError, NotADriveError, OwnerError
from nearstep.storage.store import Store

NAME = "golden:axdimm?channels=2&engine=numpy&memory_bytes=8MiB"
SSD_BYTES = 1 << 20


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Axdimm]:
    with Axdimm(NAME) as runtime:
        for number in range(2):
            path = tmp_path / f"nvme{number}n1"
            assert runtime.RegisterStorage(path, SSD_BYTES, direct=False) == number
        yield runtime


def values(nbytes: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def read(runtime: Axdimm, pointer: Pointer, nbytes: int) -> np.ndarray:
    out = np.zeros(nbytes, np.uint8)
    runtime.MemcpyX2Y(out, pointer, nbytes)
    return out


def test_bytes_go_from_every_device_to_every_device(runtime) -> None:
    """All sixteen pairs, from and to any byte; what is beside them stays."""
    nbytes, checks = 10_000, 0
    for x, y in itertools.product(Place, Place):
        src, dst = runtime.MallocX(nbytes, on=x), runtime.MallocX(nbytes, on=y)
        data, before = values(nbytes, 1), values(nbytes, 2)
        runtime.MemcpyX2Y(src, data, nbytes)
        runtime.MemcpyX2Y(dst, before, nbytes)
        runtime.MemcpyX2Y(dst + 101, src + 4_099, 5_000)
        expected = before.copy()
        expected[101:5_101] = data[4_099:9_099]
        assert (read(runtime, dst, nbytes) == expected).all(), (x, y)
        assert (read(runtime, src, nbytes) == data).all()
        runtime.FreeX(src)
        runtime.FreeX(dst)
        checks += 1
    assert checks == 16
    assert runtime.copied[Place.NVME, Place.GPU] == 5_000
    assert runtime.copied[Place.AXDIMM, Place.NVME] == 5_000


def test_a_copy_larger_than_what_the_host_holds_of_it(tmp_path) -> None:
    nbytes = (9 << 20) + 77
    with Axdimm("golden:axdimm?engine=numpy&memory_bytes=32MiB") as runtime:
        runtime.RegisterStorage(tmp_path / "nvme", 16 << 20, direct=False)
        ssd, dimm = runtime.MallocX(nbytes, on=Place.NVME), runtime.MallocX(nbytes)
        data = values(nbytes)
        runtime.MemcpyX2Y(ssd, data, nbytes)
        runtime.MemcpyX2Y(dimm, ssd, nbytes)
        assert (read(runtime, dimm, nbytes) == data).all()


def test_a_drive_and_the_gpu_copy_to_each_other_and_to_nothing_else(runtime) -> None:
    nbytes = 8_192
    gpu, ssd, host = (runtime.MallocX(nbytes, on=x) for x in (Place.GPU, Place.NVME, Place.CPU))
    data = values(nbytes)
    runtime.MemcpyX2Y(gpu, data, nbytes)
    runtime.CopyGPUToNVMe(ssd, gpu, nbytes)
    runtime.MemcpyX2Y(gpu, np.zeros(nbytes, np.uint8), nbytes)
    runtime.CopyNVMeToGPU(gpu + 4_096, ssd + 4_096, 4_096)
    found = read(runtime, gpu, nbytes)
    assert (found[4_096:] == data[4_096:]).all()
    assert not found[:4_096].any()
    written = runtime.storages[0].drives[0].bytes_written
    for action in (
        lambda: runtime.CopyNVMeToGPU(host, ssd, 1),
        lambda: runtime.CopyNVMeToGPU(gpu, host, 1),
        lambda: runtime.CopyGPUToNVMe(gpu, ssd, 1),
        lambda: runtime.CopyGPUToNVMe(ssd, host, 1),
    ):
        with pytest.raises(ArgumentError, match="must be on"):
            action()
    assert runtime.storages[0].drives[0].bytes_written == written


def test_an_array_that_has_no_bytes_of_its_own_is_refused(runtime) -> None:
    pointer = runtime.MallocX(64)
    objects = np.array([b"12345678", None], object)
    for dst, src, reason in (
        (pointer, objects, "src must have no objects"),
        (objects, pointer, "dst must have no objects"),
        (pointer, np.zeros((4, 16), np.uint8)[:, ::2], "src must be contiguous"),
    ):
        with pytest.raises(ArgumentError, match=reason):
            runtime.MemcpyX2Y(dst, src, 16)
    assert runtime.copied == {}
    assert objects.tolist() == [b"12345678", None]


def test_drives_are_filled_evenly_or_as_is_said(runtime) -> None:
    def used() -> list[int]:
        return [sum(t.nbytes for t in store.tensors.values()) for store in runtime.storages]

    for _ in range(6):
        runtime.MallocX(50_000, on=Place.NVME)
    assert used() == [150_000, 150_000]
    runtime.MallocX(1, 1, on=Place.NVME)
    assert used() == [150_000, 150_001]


def test_what_does_not_fit_is_refused_and_what_is_freed_can_be_had_again(runtime) -> None:
    for _ in range(3):
        full = [runtime.MallocX(900_000, ssd, on=Place.NVME) for ssd in (0, 1)]
        with pytest.raises(DriveFullError) as caught:
            runtime.MallocX(200_000, on=Place.NVME)
        assert caught.value.expected == 200_000
        for pointer in full:
            runtime.MemcpyX2Y(pointer, values(900_000), 900_000)
            runtime.FreeX(pointer)
        dimm = [runtime.MallocX(3 << 20, channel) for channel in (0, 1)]
        with pytest.raises(OutOfDeviceMemoryError):
            runtime.MallocX(3 << 20, 1)
        for pointer in dimm:
            runtime.FreeX(pointer)


def test_adam_runs_in_acceleration_mode_and_its_results_go_to_the_drive(runtime) -> None:
    count, hyper = 1_000, {"lr": 1e-2, "eps": 1e-6}
    rng = np.random.default_rng(5)
    arrays = {name: rng.standard_normal(count).astype(np.float32) for name in "pmg"}
    arrays["v"] = np.abs(rng.standard_normal(count)).astype(np.float32)
    pointers = {name: runtime.MallocX(4 * count, 1) for name in "pmvg"}
    ssd = runtime.MallocX(4 * count, on=Place.NVME)
    for name, pointer in pointers.items():
        runtime.MemcpyX2Y(ssd, arrays[name], 4 * count)
        runtime.MemcpyX2Y(pointer, ssd, 4 * count)
    with runtime.SetArbiterAcc(1):
        run = runtime.RunAdamOnAxdimmAsync(**pointers, nparams=count, t=3, channel=1, **hyper)
        run.wait()
        with pytest.raises(ModeError):
            runtime.MemcpyX2Y(ssd, pointers["p"], 4 * count)
    with nearstep.open(NAME) as dimm:
        buffers = {name: dimm.alloc(count) for name in "pgmv"}
        for name, buffer in buffers.items():
            buffer.write(arrays[name])
        with dimm.acceleration(0):
            dimm.update("adam", buffers, step=3, **hyper).wait()
        for name in "pmv":
            runtime.MemcpyX2Y(ssd, pointers[name], 4 * count)
            out = np.zeros(count, np.float32)
            runtime.MemcpyX2Y(out, ssd, 4 * count)
            assert (out.view(np.uint32) == buffers[name].read().view(np.uint32)).all()
            assert (out != arrays[name]).any()


def test_bad_arguments_are_refused_before_anything_is_touched(runtime, tmp_path) -> None:
    pointers = {place: runtime.MallocX(100, on=place) for place in Place}
    cpu, dimm, gpu, ssd = (pointers[each] for each in Place)
    data = values(100)
    for pointer in pointers.values():
        runtime.MemcpyX2Y(pointer, data, 100)
    freed = runtime.MallocX(10)
    runtime.FreeX(freed)
    fixed = np.zeros(100, np.uint8)
    fixed.flags.writeable = False
    other = Axdimm(NAME)
    other.RegisterStorage(tmp_path / "other", SSD_BYTES, direct=False)
    foreign = [other.MallocX(100, on=each) for each in (Place.AXDIMM, Place.NVME)]
    mixed = {**dict.fromkeys("pmv", dimm), "g": foreign[0], "t": 1}
    adam = {"p": dimm, "m": dimm, "v": dimm, "g": dimm, "t": 1}
    bad = [
        (OutOfBoundsError, lambda: runtime.MemcpyX2Y(dimm, ssd, 101)),
        (OutOfBoundsError, lambda: runtime.MemcpyX2Y(dimm + 50, ssd, 51)),
        (OutOfBoundsError, lambda: runtime.MemcpyX2Y(dimm, ssd + -1, 5)),
        (OutOfBoundsError, lambda: runtime.MemcpyX2Y(ssd, data[:50], 51)),
        (OverlapError, lambda: runtime.MemcpyX2Y(ssd, ssd + 10, 20)),
        (OverlapError, lambda: runtime.MemcpyX2Y(dimm + 10, dimm, 11)),
        (OverlapError, lambda: runtime.MemcpyX2Y(cpu, cpu, 1)),
        (OverlapError, lambda: runtime.MemcpyX2Y(data[10:], data, 20)),
        (ArgumentError, lambda: runtime.MemcpyX2Y(fixed, ssd, 1)),
        (ArgumentError, lambda: runtime.MemcpyX2Y(dimm, freed, 1)),
        (ArgumentError, lambda: runtime.MemcpyX2Y(dimm, b"bytes", 1)),
        (ArgumentError, lambda: runtime.MemcpyX2Y(dimm, ssd, -1)),
        (ArgumentError, lambda: runtime.MemcpyX2Y(dimm, np.zeros((4, 4))[:, 1], 4)),
        (ArgumentError, lambda: runtime.FreeX(freed)),
        *((ArgumentError, partial(runtime.FreeX, each)) for each in foreign),
        *((ArgumentError, partial(runtime.MemcpyX2Y, ssd, each, 1)) for each in foreign),
        (ArgumentError, lambda: runtime.MallocX(10, on="SSD")),
        (ArgumentError, lambda: runtime.RunAdamOnAxdimmAsync(**mixed, nparams=1)),
        (ArgumentError, lambda: runtime.FreeX(ssd + 1)),
        (ArgumentError, lambda: runtime.MallocX(0)),
        (ArgumentError, lambda: runtime.MallocX(10, 2)),
        (ArgumentError, lambda: runtime.MallocX(10, 2, on=Place.NVME)),
        (ArgumentError, lambda: runtime.MallocX(10, 0, on=Place.GPU)),
        (ArgumentError, lambda: runtime.RunAdamOnAxdimmAsync(**{**adam, "g": gpu}, nparams=1)),
        (ArgumentError, lambda: runtime.RunAdamOnAxdimmAsync(**adam, nparams=0)),
        (ArgumentError, lambda: runtime.RunAdamOnAxdimmAsync(**adam, nparams=1, channel=1)),
        (OutOfBoundsError, lambda: runtime.RunAdamOnAxdimmAsync(**adam, nparams=26)),
    ]
    for expected, action in bad:
        with pytest.raises(expected):
            action()
    for pointer in pointers.values():
        assert (read(runtime, pointer, 100) == data).all()
    assert len(bad) == 29
    other.close()


def test_a_drive_of_something_else_is_not_registered(runtime, tmp_path) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"no drive" * 1000)
    with pytest.raises(NotADriveError):
        runtime.RegisterStorage(text, direct=False)
    other = tmp_path / "other"
    Store.create([other], drive_bytes=SSD_BYTES, owner="a model", direct=False).close()
    with pytest.raises(OwnerError):
        runtime.RegisterStorage(other, direct=False)
    assert len(runtime.storages) == 2


def test_a_drive_is_registered_again_empty(tmp_path) -> None:
    path = tmp_path / "nvme"
    for nbytes in (SSD_BYTES, None, None):
        with Axdimm(NAME) as runtime:
            runtime.RegisterStorage(path, nbytes, direct=False)
            pointer = runtime.MallocX(900_000, on=Place.NVME)
            assert not read(runtime, pointer, 900_000).any()
            runtime.MemcpyX2Y(pointer, values(900_000), 900_000)
    with Axdimm(NAME) as runtime, pytest.raises(ArgumentError, match="RegisterStorage"):
        runtime.MallocX(10, on=Place.NVME)


def test_a_runtime_that_is_closed_says_so(tmp_path) -> None:
    with nearstep.open(NAME) as dimm:
        runtime = Axdimm(dimm)
        runtime.RegisterStorage(tmp_path / "nvme", SSD_BYTES, direct=False)
        pointer = runtime.MallocX(10, on=Place.NVME)
        runtime.close()
        assert not dimm.closed
        for action in (
            lambda: runtime.MallocX(10),
            lambda: runtime.FreeX(pointer),
            lambda: runtime.MemcpyX2Y(np.zeros(10, np.uint8), pointer, 10),
            lambda: runtime.RegisterStorage(tmp_path / "nvme", direct=False),
        ):
            with pytest.raises(ClosedDeviceError):
                action()
    with pytest.raises(MismatchError):
        Axdimm("golden:smartssd?engine=numpy")
