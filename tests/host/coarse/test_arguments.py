"""Calls that are wrong: refused with a typed error before any device is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import nearstep
from nearstep.coarse import CoarseDevice, CoarsePool
from nearstep.coarse.errors import TensorMismatchError
from nearstep.errors import (
    ArgumentError,
    ClosedDeviceError,
    DtypeError,
    MismatchError,
    OptionError,
    OutOfDeviceMemoryError,
    ShapeError,
    UrlError,
)
from nearstep_sim.coarse.pool_values import compare

from .conftest import URLS, emulated, random_arrays


def test_lengths_that_differ_are_told_for_every_device(pool) -> None:
    free = pool.device.free_bytes
    arrays = [np.zeros(100 + (device == 2), np.float32) for device in range(4)]
    with pytest.raises(TensorMismatchError, match=r"device 2: float32 of .101") as found:
        pool.tensor(arrays)
    assert set(found.value.found) == {0, 1, 2, 3}
    assert pool.device.free_bytes == free


def test_dtypes_that_differ_are_told_for_every_device(pool) -> None:
    arrays = [np.zeros(100, np.float16 if device == 1 else np.float32) for device in range(4)]
    with pytest.raises(TensorMismatchError, match="device 1: float16"):
        pool.tensor(arrays)


def test_only_float32_is_taken(pool) -> None:
    with pytest.raises(DtypeError):
        pool.tensor([np.zeros(8)] * 4)
    tensor = pool.tensor(8)
    with pytest.raises(DtypeError):
        tensor.write(0, np.zeros(8))
    with pytest.raises(ShapeError):
        tensor.write(0, np.zeros(9, np.float32))
    with pytest.raises(DtypeError):
        tensor.read(0, np.zeros(8))
    assert compare(tensor, np.zeros(8, np.float32)) == 32


def test_one_array_for_each_device(pool) -> None:
    with pytest.raises(ArgumentError, match="4 arrays, not 3"):
        pool.tensor([np.zeros(8, np.float32)] * 3)


def test_tensors_of_torch_are_taken_without_a_copy(pool) -> None:
    arrays = [torch.full((3, 4), float(device)) for device in range(4)]
    tensor = pool.tensor(arrays)
    out = torch.zeros(3, 4)
    pool.all_reduce(tensor)
    tensor.read(1, out)
    assert torch.equal(out, torch.full((3, 4), 6.0))
    tensor.write(2, torch.ones(3, 4))
    assert tensor.read(2).sum() == 12
    with pytest.raises(ArgumentError, match="without a copy"):
        tensor.write(0, [[1.0] * 4] * 3)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"op": "product"}, "op must be one of sum, average, max"),
        ({"wire": "fp8"}, "wire must be one of fp32, fp16, bf16"),
        ({"group": 2}, "group must be from 0 to 1"),
        ({"group": True}, "group must be"),
    ],
)
def test_options_that_do_not_exist(pool, options, error) -> None:
    tensor = pool.tensor(8)
    with pytest.raises(ArgumentError, match=error):
        pool.all_reduce(tensor, **options)
    assert tensor.event is None
    assert all(node.sync0.completed.value == 0 for node in pool.device.nodes)


def test_a_wire_format_that_the_devices_do_not_have() -> None:
    with CoarsePool.open(URLS["golden"] + "&wire_formats=fp32,bf16") as pool:
        tensor = pool.tensor(random_arrays(pool, 64, seed=1))
        pool.all_reduce(tensor, wire="bf16")
        with pytest.raises(ArgumentError, match="fp32, bf16"):
            pool.all_reduce(tensor, wire="fp16")


def test_tensors_of_another_pool_or_given_twice(pool) -> None:
    with CoarsePool.open(URLS["golden"]) as other:
        foreign = other.tensor(8)
        with pytest.raises(ArgumentError, match="must be of"):
            pool.all_reduce(foreign)
    tensor = pool.tensor(8)
    with pytest.raises(ArgumentError, match="once each"):
        pool.all_reduce([tensor, tensor])
    with pytest.raises(ArgumentError, match="must be a PoolTensor"):
        pool.all_reduce([np.zeros(8, np.float32)])


def test_devices_and_shapes_that_do_not_exist(pool) -> None:
    tensor = pool.tensor((2, 3))
    for action in (lambda: tensor.read(4), lambda: tensor.write(-1, tensor.read(0))):
        with pytest.raises(ArgumentError, match="device must be from 0 to 3"):
            action()
    for device in (-1, 4):
        for method in (emulated(pool).kill, emulated(pool).revive):
            with pytest.raises(ArgumentError, match="device must be from 0 to 3"):
                method(device)
    with pytest.raises(ArgumentError, match="negative"):
        pool.tensor(-1)
    with pytest.raises(ArgumentError, match=r"a shape, or an array for each device, not 3\.5"):
        pool.tensor(3.5)


def test_memory_that_is_full_leaves_nothing_behind(pool) -> None:
    free = pool.device.free_bytes
    with pytest.raises(OutOfDeviceMemoryError):
        pool.tensor(pool.device.config.memory_bytes // 4 // 2)
    assert pool.device.free_bytes == free


def test_bounds_of_waits(pool) -> None:
    event = pool.submit(pool.tensor(8))
    for bound in (-1, 1.5, "1"):
        with pytest.raises(ArgumentError):
            event.wait(bound)
    event.wait()


def test_a_closed_pool(pool) -> None:
    tensor = pool.tensor(8)
    pool.close()
    pool.close()
    for action in (lambda: pool.tensor(8), lambda: pool.all_reduce(tensor), pool.reset):
        with pytest.raises(ClosedDeviceError):
            action()


def test_names_of_devices_that_are_wrong() -> None:
    for url, error in (
        ("golden:coarse?devices=1", OptionError),
        ("golden:coarse?devices=65", OptionError),
        ("golden:coarse?groups=3", OptionError),
        ("golden:coarse?wire_formats=fp16", OptionError),
        ("golden:coarse?rings=2", OptionError),
        ("golden:coarser", UrlError),
        ("golden:smartssd?engine=numpy", MismatchError),
        ("sim:axdimm?no_such_option=1", MismatchError),
    ):
        with pytest.raises(error):
            CoarsePool.open(url)
    for cycles in (-1, 1.5):
        with pytest.raises(ArgumentError, match="silence_cycles must be a whole number"):
            CoarsePool.open(URLS["golden"], silence_cycles=cycles)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("link_latency=0", r"link_latency must lie in \[1, 1048576\], not 0"),
        ("link_interval=0", r"link_interval must lie in \[1, 1024\], not 0"),
        ("drop=2", r"drop must lie in \[0, 1\], not 2.0"),
        ("latency=0", r"latency must lie in \[1, 65536\]"),
    ],
)
def test_options_of_the_simulation_are_named_as_they_were_given(option, text) -> None:
    with pytest.raises(OptionError, match=f": {text}"):
        CoarsePool.open(f"{URLS['sim']}&{option}")


def test_links_and_directions_that_do_not_exist() -> None:
    with CoarsePool.open(URLS["sim"]) as pool:
        backend = emulated(pool)
        for link, direction, text in (
            (4, 0, "link must be from 0 to 3, not 4"),
            (-1, 0, "link must be from 0 to 3, not -1"),
            (0, 2, "direction must be 0 or 1, not 2"),
            (0, -1, "direction must be 0 or 1, not -1"),
        ):
            with pytest.raises(ArgumentError, match=text):
                backend.link_statistics(link, direction)


def test_a_pool_is_made_of_a_device_that_was_opened_by_name() -> None:
    with nearstep.open(URLS["golden"], CoarseDevice) as device:
        assert len(device.nodes) == 4
        pool = CoarsePool(device, silence_cycles=1000)
        assert pool.device is device
        assert pool.device.nodes[0].pool.silence_limit.value == 1000
        tensor = pool.tensor([np.full(3, n, np.float32) for n in range(4)])
        assert (pool.all_reduce(tensor).read(0) == 6).all()
        pool.close()
        assert device.closed


def test_a_pool_of_what_is_no_open_pool_device_is_refused_before_it_is_touched() -> None:
    device = nearstep.open(URLS["golden"], CoarseDevice)
    before = device.nodes[0].pool.silence_limit.value
    with pytest.raises(ArgumentError, match="silence_cycles"):
        CoarsePool(device, silence_cycles=-1)
    assert not device.closed
    assert device.nodes[0].pool.silence_limit.value == before
    device.close()
    with pytest.raises(ClosedDeviceError, match="make a pool"):
        CoarsePool(device)
    with (
        nearstep.open("golden:smartssd?engine=numpy") as other,
        pytest.raises(ArgumentError, match="device must be a CoarseDevice, not SmartssdDevice"),
    ):
        CoarsePool(other)
    with pytest.raises(ArgumentError, match="device must be a CoarseDevice, not str"):
        CoarsePool(URLS["golden"])


def test_a_name_of_another_family_is_refused_as_open_does() -> None:
    for url in ("golden:smartssd?engine=numpy", "sim:axdimm?no_such_option=1"):
        messages = []
        for opening in (CoarsePool.open, lambda name: nearstep.open(name, CoarseDevice)):
            with pytest.raises(MismatchError, match="must be driven by CoarseDevice") as found:
                opening(url)
            messages.append(str(found.value))
        assert messages[0] == messages[1]


def test_a_pool_that_cannot_be_made_leaves_no_open_device(monkeypatch) -> None:
    closed = []
    plain = CoarseDevice.close
    monkeypatch.setattr(CoarseDevice, "close", lambda self: (closed.append(self), plain(self)))
    with pytest.raises(ArgumentError, match="silence_cycles"):
        CoarsePool.open(URLS["golden"], silence_cycles=-1)
    assert len(closed) == 1


def test_another_register_map_is_refused(golden_pool) -> None:
    device = golden_pool.device
    node = emulated(golden_pool)._nodes[3]
    node.cores[1].registers["map_hash.value"] ^= 1
    with pytest.raises(MismatchError, match=r"sync1\.map_hash"):
        CoarseDevice(device.backend, "golden:coarse")


@pytest.mark.parametrize(
    "arrays", [[], True, np.array(7), [True, 3], (-1,), None, "four"], ids=repr
)
def test_what_is_neither_a_shape_nor_an_array_for_each_device(golden_pool, arrays) -> None:
    free = golden_pool.device.free_bytes
    with pytest.raises(ArgumentError):
        golden_pool.tensor(arrays)
    assert golden_pool.device.free_bytes == free


@pytest.mark.parametrize("elements", [10**12, 1 << 62, 10**30])
def test_a_tensor_that_no_host_has_memory_for(golden_pool, elements) -> None:
    free = golden_pool.device.free_bytes
    with pytest.raises(OutOfDeviceMemoryError):
        golden_pool.tensor(elements)
    assert golden_pool.device.free_bytes == free


@pytest.mark.parametrize("elements", [-5, 1.5, "a", True])
def test_only_a_number_of_elements_is_split(golden_pool, elements) -> None:
    with pytest.raises(ArgumentError, match="elements must be a whole number"):
        golden_pool.split(elements)


@pytest.mark.parametrize("path", ["", ".", "/", "a\0b", 7])
def test_only_a_path_of_a_file_is_taken(golden_pool, path) -> None:
    tensor = golden_pool.tensor(8)
    for action in (
        lambda: golden_pool.snapshot(path, [tensor]),
        lambda: golden_pool.restore(path, [tensor]),
    ):
        with pytest.raises(ArgumentError, match="path must"):
            action()


def test_tensors_are_a_sequence(golden_pool, tmp_path) -> None:
    pool, tensor = golden_pool, golden_pool.tensor(8)
    for action in (
        lambda: pool.snapshot(tmp_path / "s", tensor),
        lambda: pool.freeze(tensor).__enter__(),
        lambda: pool.restore(tmp_path / "s", tensor),
        lambda: pool.all_reduce(each for each in [tensor]),
        lambda: pool.all_reduce(None),
    ):
        with pytest.raises(ArgumentError, match="must be a sequence of PoolTensor"):
            action()
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("max_cycles", [-1, 1.5, "x"])
def test_a_wrong_bound_is_found_before_a_job_is_sent(pool, max_cycles) -> None:
    tensors = [pool.tensor(64) for _ in range(2)]
    for what in (tensors[0], tensors):
        with pytest.raises(ArgumentError, match="max_cycles"):
            pool.all_reduce(what, max_cycles=max_cycles)
        assert [tensor.event for tensor in tensors] == [None, None]


@pytest.mark.parametrize(("tensor", "device"), [(1, 0), (0, 4), (-1, 0), (0, -1), (0.0, 0)])
def test_only_a_frozen_tensor_is_read(golden_pool, tensor, device) -> None:
    with (
        golden_pool.freeze([golden_pool.tensor(8)]) as frozen,
        pytest.raises(ArgumentError, match="must be from 0 to"),
    ):
        frozen.read(tensor, device)


def test_out_is_writable_and_of_float32(golden_pool) -> None:
    tensor = golden_pool.tensor(8)
    fixed = np.zeros(8, np.float32)
    fixed.flags.writeable = False
    with pytest.raises(ArgumentError, match=r"PoolTensor.* must be writable"):
        tensor.read(0, fixed)
    with pytest.raises(DtypeError, match="PoolTensor"):
        tensor.read(0, np.zeros(8))


@pytest.mark.parametrize("url", URLS.values(), ids=URLS)
def test_only_a_device_is_killed(url) -> None:
    with CoarsePool.open(url) as pool:
        for device in (1.5, "a", 4, -1, True, np.True_):
            with pytest.raises(ArgumentError, match="device must be from 0 to 3"):
                emulated(pool).kill(device)
    with pytest.raises(ClosedDeviceError):
        emulated(pool).kill(0)
