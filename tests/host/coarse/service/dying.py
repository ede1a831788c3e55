"""Clients whose connection ends at a moment that a test chooses, and what must be left then."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from nearstep.coarse.service import Client
from nearstep.coarse.service import replies as module
from nearstep.coarse.service.errors import ServiceError
from nearstep.coarse.service.wire import Connection

from .conftest import Service
from .oracle import expected_sum

ELEMENTS = 2100
BOUND_S = 30.0
"""Half of what a client that is told nothing waits for; a loaded machine takes many seconds."""


@dataclass(frozen=True)
class Moment:
    """After so many frames `sent` or `received`, or `bytes` sent."""

    kind: str
    count: int


class Dying(Connection):
    """A connection that ends at a moment.

    The frames until it has joined have `hello` bytes.
    """

    def __init__(self, moment: Moment, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.moment = moment
        self.hello = 0
        self.counts = {"sent": 0, "received": 0, "bytes": 0}

    def _count(self, kind: str, step: int = 1) -> None:
        self.counts[kind] += step
        if self.moment.kind == kind and self.counts[kind] >= self.moment.count:
            self.end()

    def send(self, *arguments: Any, **options: Any) -> None:
        super().send(*arguments, **options)
        self._count("sent")
        if self.counts["sent"] == 2:
            self.hello = self.counts["bytes"]

    def send_if_free(self, message: Any) -> None:
        """No signs of life: they would come at any time."""

    def _sendmsg(self, parts: Sequence[memoryview], descriptors: Sequence[int] = ()) -> int:
        if self.moment.kind == "bytes":
            left = self.moment.count - self.counts["bytes"]
            if left <= 0:
                raise ConnectionResetError("ended")
            parts = [memoryview(b"".join(parts))[:left]]
        sent = super()._sendmsg(parts, descriptors)
        self._count("bytes", sent)
        return sent

    def take(self, *arguments: Any) -> Any:
        message = super().take(*arguments)
        if message is not None:
            self._count("received")
        return message


class Deaths:
    """Runs small jobs in which a client dies.

    Parameters
    ----------
    service
    monkeypatch
    act : what each client of a job does; `session` unless given.
    """

    def __init__(
        self,
        service: Service,
        monkeypatch: pytest.MonkeyPatch,
        act: Callable[[Client], np.ndarray] | None = None,
    ) -> None:
        self.service = service
        self.act = act or session
        self.local = threading.local()
        self.died: list[Dying] = []
        monkeypatch.setattr(module, "Connection", self._connection)

    def _connection(self, *arguments: Any) -> Connection:
        moment = getattr(self.local, "moment", None)
        if moment is None:
            return Connection(*arguments)
        self.died.append(Dying(moment, *arguments))
        return self.died[-1]

    def run(self, clients: int, dying: int, moment: Moment) -> list[Any]:
        """What each client got: an array, or an error. All in a bounded time."""

        def one(rank: int) -> Any:
            self.local.moment = moment if rank == dying else None
            if rank == dying:
                self._wait_for_others(clients)
            try:
                with self.service.client(rank, clients, "one name", timeout_s=60) as client:
                    return self.act(client)
            except ServiceError as error:
                return error
            finally:
                self.local.moment = None

        begun = time.monotonic()
        self.died.clear()
        with ThreadPoolExecutor(clients) as threads:
            found = list(threads.map(one, range(clients)))
        assert time.monotonic() - begun < BOUND_S, (moment, found)
        self.service.wait_idle()
        return found

    def _wait_for_others(self, clients: int) -> None:
        """Until they have joined: nobody is told of one who never came."""
        deadline = time.monotonic() + BOUND_S
        jobs = self.service.server.dispatcher.jobs
        while "one name" not in jobs or len(jobs["one name"].sessions) < clients - 1:
            assert time.monotonic() < deadline
            time.sleep(0.001)


def inputs(clients: int) -> list[np.ndarray]:
    rng = np.random.default_rng(clients)
    return [rng.standard_normal(ELEMENTS).astype(np.float32) for _ in range(clients)]


def session(client: Client) -> np.ndarray:
    """One of each thing that a client asks for."""
    out = np.empty(ELEMENTS, np.float32)
    exchange = client.exchange(ELEMENTS)
    exchange.reduce(inputs(client.clients)[client.rank], out)
    client.keep(f"from {client.rank}", out.view(np.uint8))
    got = np.empty_like(out)
    client.get(f"from {(client.rank + 1) % client.clients}", got.view(np.uint8))
    np.testing.assert_array_equal(got.view(np.uint32), out.view(np.uint32))
    client.keep(f"kept {client.rank}", out.view(np.uint8))
    client.barrier()
    exchange.close()
    return out


def expected(service: Service, clients: int) -> np.ndarray:
    pool = service.server.dispatcher.pool
    return expected_sum(
        inputs(clients),
        devices=pool.devices,
        operation="sum",
        wire="fp32",
        shard_bytes=4096,
        config=pool.device.config,
    )


def descriptors() -> tuple[str, ...]:
    """What the open descriptors of this process are of, without numbers."""
    found = []
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the folder
            found.append(os.readlink(f"/proc/self/fd/{each}").split("[")[0])
    return tuple(sorted(found))


@dataclass
class Left:
    """What a process and a service hold."""

    descriptors: tuple[str, ...]
    threads: int
    device_bytes: int

    @classmethod
    def of(cls, service: Service) -> Left:
        gc.collect()  # what errors refer to
        return cls(
            descriptors(),
            threading.active_count(),
            service.server.dispatcher.pool.device.free_bytes,
        )


def check_left(service: Service, before: Left) -> None:
    """Everything is given back, after a moment."""
    deadline = time.monotonic() + BOUND_S
    while (now := Left.of(service)) != before:
        assert time.monotonic() < deadline, (before, now)
        time.sleep(0.05)


@contextmanager
def recorded() -> Iterator[list[Any]]:
    """Exceptions that end threads; there must be none."""
    found: list[Any] = []
    before = threading.excepthook
    threading.excepthook = found.append
    try:
        yield found
    finally:
        threading.excepthook = before
    assert not found


@contextmanager
def beside(service: Service) -> Iterator[Callable[[], int]]:
    """Another job of two clients that goes on meanwhile; gives the number of its right sums."""
    ended = threading.Event()
    arrays = inputs(2)
    right = expected(service, 2)
    counts = [0, 0]

    def one(client: Client) -> None:
        exchange = client.exchange(ELEMENTS)
        out = np.empty(ELEMENTS, np.float32)
        said = np.zeros(1, np.uint8)
        while True:
            exchange.reduce(arrays[client.rank], out)
            np.testing.assert_array_equal(out.view(np.uint32), right.view(np.uint32))
            counts[client.rank] += 1
            key = f"end {counts[client.rank]}"
            if client.rank == 0:
                said[0] = ended.is_set()
                client.keep(key, said)
            else:
                client.get(key, said)
            if said[0]:
                break
            time.sleep(0.002)
        exchange.close()

    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(service.run, 2, one)
        try:
            yield lambda: min(counts)
        finally:
            ended.set()
            running.result(60)
    service.wait_idle()
