"""Calls that are wrong: refused with a typed error before any device is touched."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import nearstep
from nearstep.coarse import CoarseDevice, CoarsePool, PoolTensor
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


Call = Callable[[CoarsePool, PoolTensor], object]


def read_frozen(tensor: object, device: object) -> Call:
    def call(pool: CoarsePool, mine: PoolTensor) -> None:
        with pool.freeze([mine]) as frozen:
            frozen.read(tensor, device)  # type: ignore[arg-type]

    return call


def fixed(size: int) -> np.ndarray:
    array = np.zeros(size, np.float32)
    array.flags.writeable = False
    return array


F32, F64 = np.zeros(8, np.float32), np.zeros(8)
REFUSED: list[tuple[type[Exception], str, list[Call]]] = [
    (DtypeError, "float32", [lambda p, t: p.tensor([F64] * 4), lambda p, t: t.write(0, F64)]),
    (DtypeError, "PoolTensor", [lambda p, t: t.read(0, F64)]),
    (ShapeError, "shape", [lambda p, t: t.write(0, np.zeros(9, np.float32))]),
    (ArgumentError, "must be writable", [lambda p, t: t.read(0, fixed(8))]),
    (ArgumentError, "4 arrays, not 3", [lambda p, t: p.tensor([F32] * 3)]),
    (ArgumentError, "sum, average, max", [lambda p, t: p.all_reduce(t, op="product")]),
    (ArgumentError, "fp32, fp16, bf16", [lambda p, t: p.all_reduce(t, wire="fp8")]),
    (
        ArgumentError,
        "group must be from 0 to 1",
        [lambda p, t, g=g: p.all_reduce(t, group=g) for g in (2, True)],
    ),
    (ArgumentError, "once each", [lambda p, t: p.all_reduce([t, t])]),
    (ArgumentError, "must be a PoolTensor", [lambda p, t: p.all_reduce([F32])]),
    (
        ArgumentError,
        "device must be from 0 to 3",
        [lambda p, t: t.read(4), lambda p, t: t.write(-1, t.read(0))]
        + [lambda p, t, d=d: emulated(p).kill(d) for d in (-1, 4, 1.5, "a", True, np.True_)]
        + [lambda p, t, d=d: emulated(p).revive(d) for d in (-1, 4)],
    ),
    (ArgumentError, "negative", [lambda p, t, s=s: p.tensor(s) for s in (-1, (-1,))]),
    (
        ArgumentError,
        "array",
        [
            lambda p, t, a=a: p.tensor(a)
            for a in (3.5, [], True, np.array(7), [True, 3], None, "four")
        ],
    ),
    (
        OutOfDeviceMemoryError,
        "bytes",
        [lambda p, t, n=n: p.tensor(n) for n in (10**12, 1 << 62, 10**30)]
        + [lambda p, t: p.tensor(p.device.config.memory_bytes // 4 // 2)],
    ),
    (
        ArgumentError,
        "elements must be a whole number",
        [lambda p, t, n=n: p.split(n) for n in (-5, 1.5, "a", True)],
    ),
    (
        ArgumentError,
        "path must",
        [
            lambda p, t, m=m, path=path: getattr(p, m)(path, [t])
            for path in ("", ".", "/", "a\0b", 7)
            for m in ("snapshot", "restore")
        ],
    ),
    (
        ArgumentError,
        "must be a sequence of PoolTensor",
        [
            lambda p, t: p.snapshot("s", t),
            lambda p, t: p.freeze(t).__enter__(),
            lambda p, t: p.restore("s", t),
            lambda p, t: p.all_reduce(each for each in [t]),
            lambda p, t: p.all_reduce(None),
        ],
    ),
    (
        ArgumentError,
        "max_cycles",
        [
            lambda p, t, n=n, many=many: p.all_reduce([t] if many else t, max_cycles=n)
            for n in (-1, 1.5, "x")
            for many in (False, True)
        ],
    ),
    (
        ArgumentError,
        "must be from 0 to",
        [read_frozen(*each) for each in ((1, 0), (0, 4), (-1, 0), (0, -1), (0.0, 0))],
    ),
]


def test_what_cannot_be_is_refused_before_a_device_is_touched(pool, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    tensor = pool.tensor(8)
    free, checked = pool.device.free_bytes, 0
    for kind, text, calls in REFUSED:
        for call in calls:
            with pytest.raises(kind, match=text):
                call(pool, tensor)
            assert (tensor.event, pool.device.free_bytes) == (None, free), text
            checked += 1
    assert checked == sum(len(calls) for *_, calls in REFUSED)
    assert not [*tmp_path.iterdir()]
    assert all(node.sync0.completed.value == 0 for node in pool.device.nodes)
    assert compare(tensor, F32) == 32


def test_a_tensor_of_another_pool_and_a_wait_without_a_bound(pool) -> None:
    with (
        CoarsePool.open(URLS["golden"]) as other,
        pytest.raises(ArgumentError, match="must be of"),
    ):
        pool.all_reduce(other.tensor(8))
    event = pool.submit(pool.tensor(8))
    for bound in (-1, 1.5, "1"):
        with pytest.raises(ArgumentError):
            event.wait(bound)
    event.wait()


def test_a_wire_format_that_the_devices_do_not_have() -> None:
    with CoarsePool.open(URLS["golden"] + "&wire_formats=fp32,bf16") as pool:
        tensor = pool.tensor(random_arrays(pool, 64, seed=1))
        pool.all_reduce(tensor, wire="bf16")
        with pytest.raises(ArgumentError, match="fp32, bf16"):
            pool.all_reduce(tensor, wire="fp16")


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


@pytest.mark.parametrize("url", URLS.values(), ids=URLS)
def test_no_device_of_a_closed_pool_is_killed(url) -> None:
    with CoarsePool.open(url) as pool:
        pass
    with pytest.raises(ClosedDeviceError):
        emulated(pool).kill(0)
