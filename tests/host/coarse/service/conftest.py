"""A service in this process, and clients in threads."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.service import Client, Server
from nearstep.coarse.service.exchange import Exchange
from nearstep.coarse.service.handshake import proof
from nearstep.coarse.service.messages import VERSION, Challenge, Hello, Proof
from nearstep.coarse.service.wire import Connection

SMALL = "entry_phits=8&buffer_entries=4&chunks_ahead=2&queue_jobs=4&memory_bytes=4MiB"
TOKEN = "of a test"


def put_in(exchange: Exchange, values: Any) -> None:
    """What a client pushes of a tensor with a place for each shard: an array, or one number."""
    array = np.broadcast_to(np.float32(values), exchange.elements)
    for shard, (start, stop) in enumerate(exchange.shards):
        exchange.pushed(shard)[:] = array[start:stop]


def taken_from(exchange: Exchange) -> np.ndarray:
    """What has come back of such a tensor."""
    return np.concatenate([exchange.pulled(shard) for shard in range(len(exchange.shards))])


def greet(connection: Connection, *, token: str = TOKEN, **fields: Any) -> Any:
    """Show that one knows the token; what the service says then, or before."""
    hello = Hello(**{"version": VERSION, "job": "a", "rank": 0, "clients": 1} | fields)
    connection.send(hello)
    said = connection.receive(lambda message: None)
    if isinstance(said, Challenge):
        connection.send(Proof(proof(token, "client", hello, said.nonce)))
        if hello.clients > 1:
            return None  # it waits for others
        said = connection.receive(lambda message: None)
    return said


class Service:
    """A server, and how its clients reach it."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.numbers = itertools.count()

    def client(self, rank: int, clients: int, job: str, **options: Any) -> Client:
        options = {"timeout_s": 60} | options
        return Client(self.server.bound, TOKEN, job=job, rank=rank, clients=clients, **options)

    def run(self, clients: int, action: Callable[[Client], Any], **options: Any) -> list[Any]:
        """What `action` gives for each client of a job, all at once in threads."""
        job = f"job {next(self.numbers)}"

        def one(rank: int) -> Any:
            with self.client(rank, clients, job, **options) as client:
                return action(client)

        with ThreadPoolExecutor(clients) as threads:
            return list(threads.map(one, range(clients)))

    def wait_idle(self) -> None:
        """Until the service knows that all clients have left."""
        deadline = time.monotonic() + 60
        while self.server.dispatcher.jobs:
            assert time.monotonic() < deadline, list(self.server.dispatcher.jobs)
            time.sleep(0.01)


@pytest.fixture
def serve(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """A service of golden devices; ended after the test."""
    servers: list[Server] = []

    def made(
        devices: int = 4, *, tcp: bool = False, url: str | None = None, **options: Any
    ) -> Service:
        pool = CoarsePool.open(url or f"golden:coarse?devices={devices}&groups=2&{SMALL}")
        address = "tcp:127.0.0.1:0" if tcp else f"unix:{tmp_path}/{len(servers)}"
        defaults = {"shard_bytes": 4096, "snapshots": tmp_path, "share_memory": False}
        server = Server(pool, address, TOKEN, **(defaults | options))
        servers.append(server)
        server.start()
        return Service(server)

    yield made
    for server in servers:
        server.close()
