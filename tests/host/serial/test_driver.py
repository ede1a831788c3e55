"""The driver's tests over a link: they cannot tell it from the device that is behind it.

All of them run, on four devices, but those that tell an emulated device to misbehave or look at
what only it knows. Fast tests are those of runs, and steps of Adam, on one device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np
import pytest

from nearstep.coarse import CoarsePool

from ..coarse.conftest import URLS as POOLS
from ..driver import test_conformance, test_pairs, test_runs, test_scan, test_start
from ..driver.job import Job, accelerated
from .conftest import FULL, URLS, over_link, sums

MODULES = (test_conformance, test_pairs, test_runs, test_scan, test_start)
FIXTURES = {"device", "full", "opened", "start", "any_start"}
"""Of tests on a device that others open for them."""


def borrowed() -> dict[str, Callable[..., None]]:
    """The driver's tests: their names begin with those of their files."""
    found: dict[str, Callable[..., None]] = {}
    for module in MODULES:
        for name, test in inspect.getmembers(module, inspect.isfunction):
            if name.startswith("test_") and {*inspect.signature(test).parameters} & FIXTURES:
                found[f"{module.__name__.rpartition('.')[2]}_{name[5:]}"] = test
    return found


globals().update(borrowed())


def test_enough_is_borrowed() -> None:
    assert len(borrowed()) > 30


@pytest.mark.parametrize("name", ["golden", pytest.param("sim", marks=pytest.mark.deep)])
def test_a_pool_sums_over_a_link(name: str) -> None:
    with over_link(POOLS[name]) as device:
        sums(CoarsePool(device), 777, seed=5)


@pytest.mark.parametrize("window", [1, 2, 128])
def test_any_window_gives_the_same(window: int) -> None:
    with over_link(URLS["golden-card"], window=window) as device:
        work = Job(device, 4099, 9)
        with accelerated(device):
            work.start().wait()
        assert work.check() == 3 * 4099


def test_every_size_and_alignment_of_a_copy() -> None:
    rng = np.random.default_rng(3)
    compared = 0
    with over_link(FULL["golden-card"]) as device:
        backend = device.backend
        whole = rng.integers(0, 256, 16384).astype(np.uint8)
        backend.write_memory(0, whole)
        for size in (0, 1, 3, 1023, 1024, 1025, 4095, 4096, 4097, 9001):
            for first in (0, 1, 1023, 4095, 4096):
                piece = rng.integers(0, 256, size).astype(np.uint8)
                backend.write_memory(first, piece)
                whole[first : first + size] = piece
                out = np.empty(size + 7, np.uint8)
                backend.read_memory(first, out)
                np.testing.assert_array_equal(out, whole[first : first + size + 7])
                compared += out.size
        everything = np.empty_like(whole)
        backend.read_memory(0, everything)
        np.testing.assert_array_equal(everything, whole)
    print(f"{compared} bytes compared")
    assert compared > 100_000
