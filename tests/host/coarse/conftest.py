"""Pools that the tests run on, and what they compare with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from nearstep.coarse import CoarsePool
from nearstep_sim.coarse.golden import GoldenPool
from nearstep_sim.coarse.pool import PoolBackend
from nearstep_sim.coarse.pool_values import SMALL, SMALL_MEMORY, Floats

URLS = {
    "golden": f"golden:coarse?{SMALL}&{SMALL_MEMORY}",
    "sim": f"sim:coarse?{SMALL}&{SMALL_MEMORY}",
}
"""Pools of four devices with two groups; every test that names no other runs on all."""


deep_on_rtl = pytest.mark.parametrize(
    "pool", ["golden", pytest.param("sim", marks=pytest.mark.deep)], indirect=True
)
"""For what the host does, or what another fast test asks of the RTL, too."""


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
