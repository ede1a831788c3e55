"""What several threads do to a pool at once."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from nearstep.coarse import CoarsePool
from nearstep.errors import BusyError
from nearstep_sim.coarse.pool import PoolBackend
from nearstep_sim.coarse.pool_values import compare, reduced

from .conftest import URLS, random_arrays

ROUNDS = 10


@pytest.fixture
def often() -> Iterator[None]:
    """Threads change places as often as they can."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@contextlib.contextmanager
def beside(
    action: Callable[[], None], threads: int = 1
) -> Iterator[Callable[[Callable[[], bool]], None]]:
    """An action again and again in threads of their own, whose errors are raised at the end.

    The yielded function waits until the threads have made its argument true, however the
    scheduler orders them.
    """
    stop = threading.Event()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while not stop.is_set():
                action()
        except BaseException as error:
            errors.append(error)

    running = [threading.Thread(target=work) for _ in range(threads)]
    for each in running:
        each.start()

    def wait_until(condition: Callable[[], bool]) -> None:
        late = time.monotonic() + 60
        while not condition() and not errors:
            assert time.monotonic() < late, "the threads beside did nothing for 60 s"
            time.sleep(1e-4)

    try:
        yield wait_until
    finally:
        stop.set()
        for each in running:
            each.join()
    if errors:
        raise errors[0]


def test_a_read_is_of_one_version(pool, often) -> None:
    """Elements are all equal in each version."""
    tensor = pool.tensor([np.ones(6000, np.float32)] * pool.devices)
    versions = set()

    def read() -> None:
        values = tensor.read(1)
        assert (values == values[0]).all(), f"{set(values)} in one array"
        versions.add(float(values[0]))

    expected = {4.0**version for version in range(ROUNDS + 1)}
    with beside(read, threads=2) as wait_until:
        for version in range(ROUNDS + 1):
            if version:
                pool.all_reduce(tensor)
            wait_until(lambda value=4.0**version: value in versions)
    assert float(tensor.read(0)[0]) == 4.0**ROUNDS
    assert versions == expected


def test_a_write_is_before_a_job_or_after_it(pool, often) -> None:
    tensor = pool.tensor([np.zeros(6000, np.float32)] * pool.devices)
    written = [0]

    def write() -> None:
        with contextlib.suppress(BusyError):
            tensor.write(0, np.full(6000, written[0], np.float32))
            written[0] += 1

    with beside(write) as wait_until:
        for _ in range(ROUNDS):
            pool.all_reduce(tensor, "max")
            values = tensor.read(1)
            assert (values == values[0]).all(), f"{set(values)} in one array"
            wait_until(lambda before=written[0]: written[0] > before)
    assert written[0] >= ROUNDS


def test_a_snapshot_is_read_by_many(often) -> None:
    """More than 32 pages, of which a register tells at once."""
    with CoarsePool.open("golden:coarse?devices=2&groups=2&memory_bytes=2MiB") as pool:
        arrays = random_arrays(pool, 45000, seed=3)
        tensor = pool.tensor(arrays)
        reads = [0]
        with pool.freeze([tensor]) as frozen:
            pool.all_reduce(tensor)
            pool.all_reduce(tensor)

            def read() -> None:
                np.testing.assert_array_equal(frozen.read(0, 1), arrays[1])
                reads[0] += 1

            with beside(read, threads=3) as wait_until:
                for _ in range(150):
                    np.testing.assert_array_equal(frozen.read(0, 0), arrays[0])
                wait_until(lambda: reads[0] > 100)
        assert reads[0] > 100


@pytest.mark.deep
def test_the_model_is_clocked_by_one_at_a_time(often) -> None:
    with CoarsePool.open(URLS["sim"] + "&window=direct") as pool:
        backend = pool.device.backend
        assert isinstance(backend, PoolBackend)
        arrays = random_arrays(pool, 6000, seed=4)
        tensor = pool.tensor(arrays)
        with beside(lambda: backend.run(10), threads=2):
            pool.all_reduce(tensor, "average")
            pool.counters()
        assert compare(tensor, reduced(pool, arrays, "average")) == 24000
