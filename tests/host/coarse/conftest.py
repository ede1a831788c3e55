"""Pools that the tests run on, and what they compare with."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from nearstep.coarse import CoarsePool
from nearstep_sim.coarse.golden import GoldenPool
from nearstep_sim.coarse.pool import PoolBackend
from nearstep_sim.coarse.pool_values import SMALL, SMALL_MEMORY, Floats
from nearstep_sim.coarse.shipped_ring import shipped_ring

URLS = {
    "golden": f"golden:coarse?{SMALL}&{SMALL_MEMORY}",
    "sim": f"sim:coarse?{SMALL}&{SMALL_MEMORY}",
}
"""Pools of four devices with two groups; every test that names no other runs on all."""


deep_on_rtl = pytest.mark.parametrize(
    "pool", ["golden", pytest.param("sim", marks=pytest.mark.deep)], indirect=True
)
"""For what the host does, or what another fast test asks of the RTL, too."""

TOPS = {"ring": URLS["sim"]}
"""Those devices as `nearstep rtl` writes them, in one object."""

EVERY = [*URLS, *(pytest.param(name, marks=pytest.mark.deep) for name in TOPS)]
"""For lists of faults, which the whole product has to bear."""

deep_on_tops = pytest.mark.parametrize(
    "pool",
    ["golden", *(pytest.param(name, marks=pytest.mark.deep) for name in ("sim", *TOPS))],
    indirect=True,
)
"""As `deep_on_rtl`, for those lists."""


def opened(name: str, **options: int) -> CoarsePool:
    """A pool by its name in `URLS` or `TOPS`."""
    if name in TOPS:
        return CoarsePool(shipped_ring(TOPS[name], links_inside=False), **options)
    return CoarsePool.open(URLS[name], **options)


@pytest.fixture(params=URLS)
def pool(request: pytest.FixtureRequest) -> Iterator[CoarsePool]:
    with opened(request.param) as each:
        yield each


@pytest.fixture
def golden_pool() -> Iterator[CoarsePool]:
    """One whose inner state a test can look at."""
    with opened("golden") as each:
        yield each


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
