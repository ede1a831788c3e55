"""Boards with COARSE devices as one pool: golden devices behind links of their own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Poll
from nearstep.coarse import CoarseDevice, CoarsePool
from nearstep.coarse.errors import SilentLinkError
from nearstep.device import drive, open_backend
from nearstep.errors import (
    ArgumentError,
    BusError,
    ClosedDeviceError,
    OptionError,
    OutOfBoundsError,
)
from nearstep.serial.backend import LinkBackend
from nearstep.serial.errors import PortNotFoundError, WrongBoardError
from nearstep.serial.link import Link
from nearstep.serial.ring import BoardRing
from nearstep_sim.coarse.golden import GoldenPool
from nearstep_sim.coarse.pool_values import compare, reduced
from nearstep_sim.serial.endpoint import Endpoint
from nearstep_sim.serial.line import Loopback
from nearstep_sim.serial.pty_server import PtyServer
from nearstep_sim.serial.serve import wire_of
from nearstep_spec.coarse.registers import register_bytes

from ..coarse.conftest import random_arrays
from ..driver.conftest import URLS
from .conftest import open_port, sums

SHAPE = (
    "alus=4&entry_phits=8&buffer_entries=4&chunks_ahead=2&queue_jobs=2&memory_bytes=64KiB"
    "&snapshot_pages=4"
)


class Slice(Backend):
    """One device of a pool, as a board has it: its registers and memory begin at 0."""

    family = "coarse"

    def __init__(self, pool: Backend, number: int) -> None:
        self.config = pool.config
        base, self.capacity_bytes = pool.regions[number]
        self._pool = pool
        self._registers = number * register_bytes(pool.config)
        self._base = base

    @property
    def cycles(self) -> int | None:
        return self._pool.cycles

    def read_register(self, address: int) -> int:
        return self._pool.read_register(self._registers + address)

    def write_register(self, address: int, value: int) -> None:
        self._pool.write_register(self._registers + address, value)

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        self._pool.read_memory(self._base + address, out)

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        self._pool.write_memory(self._base + address, data)

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        offset = self._registers
        moved = [Poll(address=p.address + offset, mask=p.mask, value=p.value) for p in polls]
        self._pool.wait(moved, max_cycles)

    def reset(self) -> None:
        """Of one device alone there is none."""

    def close(self) -> None:
        """The pool is closed by who opened it."""


def endpoints(
    devices: int, groups: int = 2, shape: str = SHAPE
) -> tuple[GoldenPool, list[Endpoint]]:
    """A golden pool, and each device of it as a board."""
    pool = open_backend(f"golden:coarse?devices={devices}&groups={groups}&{shape}")
    assert isinstance(pool, GoldenPool)
    for base, nbytes in pool.regions:
        pool.claim(base, nbytes)
    return pool, [Endpoint(Slice(pool, number), f"board{number}") for number in range(devices)]


def linked(endpoint: Endpoint) -> LinkBackend:
    return LinkBackend(Link(Loopback(endpoint)))


@contextmanager
def ring(devices: int, groups: int = 2) -> Iterator[tuple[GoldenPool, CoarsePool]]:
    """A golden pool, and the pool of its devices behind links of their own."""
    golden, boards = endpoints(devices, groups)
    device = drive(BoardRing([linked(each) for each in boards]), "serial:ring")
    assert isinstance(device, CoarseDevice)
    with CoarsePool(device) as pool:
        yield golden, pool
    golden.close()


@pytest.mark.parametrize(("devices", "groups"), [(2, 1), (3, 2)])
def test_boards_in_a_ring_sum_as_a_pool(devices: int, groups: int) -> None:
    with ring(devices, groups) as (_, pool):
        sums(pool, 777, seed=7)
        assert pool.devices == devices


def test_a_board_that_falls_silent_ends_all_and_the_ring_is_usable_after_a_reset() -> None:
    with ring(3) as (golden, pool):
        arrays = random_arrays(pool, 100, seed=8)
        tensor = pool.tensor(arrays)
        golden.kill(1)
        with pytest.raises(SilentLinkError, match="heard nothing from device") as caught:
            pool.all_reduce(tensor)
        assert caught.value.transactions
        assert compare(tensor, arrays) == 300
        golden.revive(1)
        pool.reset()
        pool.all_reduce(tensor)
        assert compare(tensor, reduced(pool, arrays)) == 300


def test_an_access_across_boards_is_cut() -> None:
    golden, boards = endpoints(3)
    backend = BoardRing([linked(each) for each in boards])
    size = backend.regions[0][1]
    assert backend.capacity_bytes == 3 * size
    data = np.random.default_rng(9).integers(0, 256, size + 3000).astype(np.uint8)
    backend.write_memory(size - 1000, data)
    out = np.empty_like(data)
    backend.read_memory(size - 1000, out)
    np.testing.assert_array_equal(out, data)
    for at, end in ((size - 1000, size), (size, 2 * size), (2 * size, 2 * size + 2000)):
        golden.read_memory(at, out[: end - at])
        np.testing.assert_array_equal(out[: end - at], data[at - size + 1000 :][: end - at])
    with pytest.raises(OutOfBoundsError):
        backend.read_memory(3 * size - 1, np.empty(2, np.uint8))
    for access in (backend.read_register, lambda address: backend.write_register(address, 0)):
        with pytest.raises(BusError, match="DECERR"):
            access(3 * register_bytes(golden.config))
    assert any(each.startswith("loopback: ") for each in backend.transactions())
    with pytest.raises(ValueError, match="ring is 3 boards: a terminal is the line of one"):
        wire_of(backend, "ring", window=7, reset_after=None)
    backend.close()
    golden.close()


def test_boards_that_make_no_ring_are_refused_and_closed() -> None:
    golden, boards = endpoints(2)
    other, others = endpoints(2, shape=SHAPE.replace("queue_jobs=2", "queue_jobs=4"))
    card = open_backend(URLS["golden-card"])
    updater = Endpoint(card, "updater board")
    whole = open_backend(f"golden:coarse?devices=2&{SHAPE}")
    cases: list[tuple[list[Endpoint], type[Exception], str]] = [
        ([boards[0]], ArgumentError, "2 to 64 boards, not 1"),
        ([boards[0], updater], WrongBoardError, "updater board on .* family coarse, not smartssd"),
        ([updater, boards[0]], WrongBoardError, "updater board on .* family coarse, not smartssd"),
        ([boards[0], others[1]], WrongBoardError, r"\{'queue_jobs': 2\}, as on .*'queue_jobs': 4"),
        ([boards[0], Endpoint(whole, "pool")], WrongBoardError, "memories of pool on .* not 2"),
    ]
    for given, kind, what in cases:
        links = [linked(each) for each in given]
        with pytest.raises(kind, match=what):
            BoardRing(links)
        for each in links:
            with pytest.raises(ClosedDeviceError):
                each.read_register(0)
    assert len(cases) == 5
    for backend in (golden, other, card, whole):
        backend.close()


def test_one_board_alone_is_a_device_and_no_pool() -> None:
    golden, boards = endpoints(2)
    with drive(linked(boards[1]), "serial:alone") as device:
        assert isinstance(device, CoarseDevice)
        assert len(device.nodes) == 1
        assert not device.nodes[0].pool.status.busy
        with pytest.raises(ArgumentError, match=r"not 1 on serial:alone; .* peers="):
            CoarsePool(device)
    golden.close()


def test_ports_make_a_ring(tmp_path: Path) -> None:
    golden, boards = endpoints(2)
    with ExitStack() as stack:
        stack.callback(golden.close)
        servers = [stack.enter_context(PtyServer(Loopback(each))) for each in boards]
        for server in servers:
            server.start()
        first, second = (server.path for server in servers)
        with pytest.raises(PortNotFoundError):
            open_port(first, peers=tmp_path / "none")
        device = open_port(first, peers=second)  # the first was given back
        assert isinstance(device, CoarseDevice)
        with CoarsePool(device) as pool:
            sums(pool, 65, seed=10)
    with pytest.raises(OptionError, match="peers must be paths, not 'a,'"):
        open_port(tmp_path, peers="a,")
