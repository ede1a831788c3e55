"""Emulated devices behind a link: over a line in this process, or behind a pseudo-terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from nearstep.backends import serial
from nearstep.coarse import CoarsePool
from nearstep.device import Device, drive, open_backend
from nearstep.serial.backend import LinkBackend
from nearstep.serial.link import Link
from nearstep.updater.device import KernelDevice
from nearstep_sim.coarse.pool_values import compare, reduced
from nearstep_sim.serial.endpoint import Endpoint
from nearstep_sim.serial.line import Loopback
from nearstep_sim.serial.pty_server import PtyServer

from ..coarse.conftest import random_arrays
from ..driver.conftest import DIMMS, FULL, URLS, chosen
from ..driver.job import Job
from ..driver.start import Start
from ..driver.test_conformance import ROWS
from ..driver.test_start import start

__all__ = ["start"]
"""A fixture of other tests that those here use as it is."""

HERE = Path(__file__).parent
FAST = {"golden-card"}
ALL = {*FAST, "golden-dimm", "sim-card", "sim-dimm"}
"""Of the devices of the driver's tests: those that tests here have behind a link, the fast ones and
all."""

PATIENT: dict[str, object] = {"wait": 5.0, "tries": 20}


def over_link(url: str, *, window: int = 7, tries: int = 10, **line: Any) -> Device:
    """The device named `url` behind a link in this process; closing it closes both."""
    emulated = open_backend(url)
    board = Loopback(Endpoint(emulated, url, window=window), **line)
    backend = LinkBackend(Link(board, tries=tries))
    close = backend.close

    def close_both() -> None:
        close()
        emulated.close()

    backend.close = close_both  # type: ignore[method-assign]
    return drive(backend, f"serial:{url}")


@contextmanager
def served(url: str, **options: Any) -> Iterator[PtyServer]:
    """The device named `url` behind a pseudo-terminal, served by a thread."""
    emulated = open_backend(url)
    line = {name: options.pop(name) for name in ("reset_after",) if name in options}
    board = Loopback(Endpoint(emulated, url, window=options.pop("window", 7)), **line)
    with PtyServer(board, **options) as server:
        server.start()
        yield server
    emulated.close()


def open_port(path: object, **options: object) -> Device:
    """What `nearstep.open("serial:<path>?...")` gives, whether the package is installed or not.

    Waits are long unless given: on a machine that has other things to do nothing is sent twice.
    """
    texts = {name: str(value) for name, value in (PATIENT | options).items()}
    return drive(serial.open_device(str(path), texts), f"serial:{path}")


COUNT = 4099


def works(device: Any, seed: int = 5) -> int:
    """Make a step on a device; the number of values compared."""
    work = Job(device, COUNT, seed)
    work.run()
    return work.check()


def sums(pool: CoarsePool, count: int, seed: int) -> None:
    """All-reduce random arrays on a pool, and compare them with the golden model."""
    arrays = random_arrays(pool, count, seed=seed)
    tensor = pool.tensor(arrays)
    pool.all_reduce(tensor)
    assert compare(tensor, reduced(pool, arrays)) == count * pool.devices


@pytest.fixture(params=chosen(URLS, set(URLS) - FAST))
def device(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    """A device of the driver's tests behind a link."""
    with over_link((URLS | DIMMS)[request.param]) as opened:
        assert isinstance(opened, KernelDevice)
        yield opened


@pytest.fixture(params=chosen(FULL, set(FULL) - FAST))
def full(request: pytest.FixtureRequest) -> Iterator[KernelDevice]:
    """One whose kernels have everything."""
    with over_link(FULL[request.param]) as opened:
        assert isinstance(opened, KernelDevice)
        yield opened


STEPS = {name: ROWS[name] for name in ("golden-card-adam", "golden-card-all", "golden-dimm-all",
                                       "sim-card-as-it-is-shipped", "sim-dimm-adam")}  # fmt: skip


@pytest.fixture(params=chosen(STEPS, set(STEPS) - {"golden-card-adam"}))
def opened(request: pytest.FixtureRequest) -> Iterator[tuple[KernelDevice, list[str]]]:
    """A device, and the optimizers that it has."""
    url, names = STEPS[request.param]
    with over_link(url) as device:
        assert isinstance(device, KernelDevice)
        yield device, names


@pytest.fixture
def any_start(full: KernelDevice) -> Start:
    return Start(full)


@pytest.fixture
def job(device: KernelDevice) -> Callable[..., Job]:
    """Make a job on the device."""
    return partial(Job, device)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of the driver's tests here those on other devices than `ALL` are left out; of those that
    stay, the ones on others than `FAST`, and those of slow files, are deep."""
    left_out = []
    for item in [each for each in items if each.path == HERE / "test_driver.py"]:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        names = {str(parameters[each]) for each in ("device", "full") if each in parameters}
        slow = ("test_pairs_", "test_scan_", "test_start_", "test_conformance_every",
                "test_conformance_values")  # fmt: skip
        if names - ALL:
            left_out.append(item)
        elif names - FAST or item.name.startswith(slow):
            item.add_marker(pytest.mark.deep)
    items[:] = [each for each in items if each not in left_out]
    config.hook.pytest_deselected(items=left_out)
