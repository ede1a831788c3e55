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
from nearstep_sim.bench.pool_values import compare

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
        pool.all_reduce(np.zeros(8, np.float32))


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
        ("link_latency=0", "link_latency must be a whole number from 1"),
        ("link_interval=0", "link_interval must be a whole number from 1"),
        ("drop=2", "drop must be a chance from 0 to 1"),
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


def test_the_family_is_opened_by_name() -> None:
    with nearstep.open(URLS["golden"]) as device:
        assert isinstance(device, CoarseDevice)
        assert len(device.nodes) == 4


def test_another_register_map_is_refused(golden_pool) -> None:
    device = golden_pool.device
    node = emulated(golden_pool)._nodes[3]
    node.cores[1].registers["map_hash.value"] ^= 1
    with pytest.raises(MismatchError, match=r"sync1\.map_hash"):
        CoarseDevice(device.backend, "golden:coarse")
