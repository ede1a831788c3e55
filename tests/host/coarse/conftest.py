"""Pools that the tests run on, and what they compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep.coarse import CoarsePool, PoolTensor
from nearstep_sim.device.golden_coarse import GoldenPool
from nearstep_sim.device.pool import PoolBackend
from nearstep_sim.golden.coarse import ring_all_reduce

Floats = NDArray[np.float32]

SHAPE = "devices=4&groups=2&entry_phits=8&buffer_entries=4&chunks_ahead=2&queue_jobs=2"
"""Small entries of 32 elements, so that a few hundred elements are several chunks."""

MEMORY = "memory_bytes=1MiB&snapshot_pages=64"

URLS = {
    "golden": f"golden:coarse?{SHAPE}&{MEMORY}",
    "sim": f"sim:coarse?{SHAPE}&{MEMORY}",
}
"""Pools of four devices with two groups; every test that names no other runs on all."""


@pytest.fixture(params=URLS)
def pool(request: pytest.FixtureRequest) -> Iterator[CoarsePool]:
    with CoarsePool.open(URLS[request.param]) as opened:
        yield opened


@pytest.fixture
def golden_pool() -> Iterator[CoarsePool]:
    """One whose inner state a test can look at."""
    with CoarsePool.open(URLS["golden"]) as opened:
        yield opened


def emulated(pool: CoarsePool) -> GoldenPool | PoolBackend:
    """The emulation behind a pool."""
    assert isinstance(pool.device.backend, GoldenPool | PoolBackend)
    return pool.device.backend


def random_arrays(
    pool: CoarsePool, shape: int | tuple[int, ...], seed: int, *, special: bool = False
) -> list[Floats]:
    """An array for each device; the seed is printed."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    arrays = [rng.standard_normal(shape).astype(np.float32) for _ in range(pool.devices)]
    if special:
        values = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3e38, -3e38], np.float32)
        for each in arrays:
            where = rng.random(each.shape) < 0.2
            each[where] = rng.choice(values, each.shape)[where]
    return arrays


def golden(
    pool: CoarsePool,
    arrays: Sequence[Floats],
    op: str = "sum",
    wire: str = "fp32",
    group: int | None = None,
) -> Floats:
    """What all devices must hold after a reduction, from the golden ring and the pool's split."""
    flat = [each.reshape(-1) for each in arrays]
    parts = [
        ring_all_reduce(
            [each[part.start : part.stop] for each in flat],
            operation=op,
            wire=wire,
            config=pool.device.config,
            reverse=part.reverse,
        )
        for part in pool.split(flat[0].size, wire, group)
    ]
    return np.concatenate(parts).reshape(arrays[0].shape)


def check(tensor: PoolTensor, expected: Floats | Sequence[Floats]) -> int:
    """Compare the arrays of all devices, bit for bit; the number of elements compared."""
    compared = 0
    for device in range(tensor.pool.devices):
        want = expected if isinstance(expected, np.ndarray) else expected[device]
        actual = tensor.read(device)
        assert actual.shape == want.shape
        np.testing.assert_array_equal(
            actual.view(np.uint32), want.view(np.uint32), err_msg=f"device {device}"
        )
        compared += actual.size
    return compared
