"""Clients that say anything in any order, and die: none of it is felt outside of their jobs."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest

from nearstep.coarse.service.errors import FrameError, StalledError
from nearstep.coarse.service.messages import (
    Attach,
    Barrier,
    Beat,
    Check,
    Close,
    Detach,
    Failed,
    FromService,
    Get,
    Leave,
    Load,
    Message,
    Missing,
    Open,
    Probe,
    Push,
    Put,
    Save,
    Update,
    Welcome,
)
from nearstep.coarse.service.plan import Layout
from nearstep.coarse.service.shared_memory import SharedMemory
from nearstep.coarse.service.wire import Address, Connection

from .conftest import Service, greet
from .dying import BOUND_S, Left, beside, check_left, recorded

SEED = 43
SIZES = (1, 8, 1023, 1024, 2100, 9 * 1024)
SEGMENT_BYTES = 1 << 18
NAMES = ("a", "b", "c")


@dataclass(eq=False)
class Rogue:
    """A client that knows the state of its job, and keeps to it or not.

    Attributes
    ----------
    opened : elements of exchanges, by number, and the version of each shard.
    """

    connection: Connection
    opened: dict[int, tuple[Layout, list[int]]] = field(default_factory=dict)
    segments: int = 0
    requests: int = 0
    sent: int = 0

    @property
    def is_shared(self) -> bool:
        return self.connection.is_shared

    def say(self, message: Message, payload: np.ndarray | None = None, *descriptors: int) -> None:
        self.connection.send(message, None if self.is_shared else payload, descriptors)
        self.sent += 1

    def attach(self) -> None:
        segment = SharedMemory(SEGMENT_BYTES)
        try:
            given = [segment.descriptor] if self.is_shared else []
            self.say(Attach(self.segments, SEGMENT_BYTES), None, *given)
        finally:
            segment.close()
        self.segments += 1

    def next_request(self) -> int:
        self.requests += 1
        return self.requests


def speak(rng: np.random.Generator, client: Rogue, folder: str) -> None:
    """Say one thing, most often one that can be."""
    wild = rng.random() < 0.05

    def number(right: int) -> int:
        return int(rng.choice([right, 0, 1, 4096, 1 << 40])) if wild else right

    def some(names: tuple[Any, ...]) -> Any:
        return names[rng.integers(len(names))]

    segment = number(int(rng.integers(max(1, client.segments))))
    match some(("attach", "open", *["push"] * 5, "close", "put", "get", "probe", "other")):
        case "attach":
            client.attach()
        case "open":
            elements = number(some(SIZES))
            exchange = number(len(client.opened))
            update = Update(some(NAMES), "adamw", some(("", "{}", "{", '{"lr": -1}')))
            client.say(
                Open(
                    exchange,
                    max(1, elements),
                    some(("sum", "average", "max")) if wild else "sum",
                    some(("fp32", "bf16", "x")) if wild else "fp32",
                    segment,
                    number(int(rng.integers(2))),
                    number(4096),
                    update if wild else None,
                    turn=number(0),
                    offset=number(0),
                )
            )
            layout = Layout.of(max(1, min(elements, 1 << 20)), 4096)
            client.opened[exchange] = layout, [0] * len(layout.shards)
        case "push" if client.opened:
            exchange = some(tuple(client.opened))
            layout, versions = client.opened[exchange]
            shard = int(rng.integers(len(versions)))
            versions[shard] += 1
            start, stop = layout.shards[shard]
            size = 0 if client.is_shared else 4 * (stop - start)
            shard, version = number(shard), number(versions[shard])
            payload = np.ones(size, np.uint8)
            client.say(Push(exchange, version, shard, number(size), turn=number(0)), payload)
        case "close" if client.opened:
            exchange = some(tuple(client.opened))
            client.say(Close(number(exchange)))
            if wild:
                client.opened.pop(exchange)
        case "put":
            size = number(some(SIZES))
            message = Put(client.next_request(), some(NAMES), segment, size)
            client.say(message, np.zeros(min(size, SEGMENT_BYTES), np.uint8))
        case "probe":
            client.say(Probe(client.next_request(), segment, 64, number(0)), np.zeros(64, np.uint8))
        case "get":
            client.say(Get(client.next_request(), some(NAMES), segment, number(some(SIZES))))
        case _:
            request = client.next_request()
            client.say(
                some(
                    (
                        Barrier(request),
                        Barrier(request),
                        Beat(),
                        Missing(request),
                        Save(request, [some(NAMES)], f"{folder}/x"),
                        Load(request, f"{folder}/{some(('x', '../x', 'none'))}"),
                        Check(request, number(0), number(1), "{}"),
                        Detach(segment) if wild else Beat(),
                        Leave() if wild else Beat(),
                    )
                )
            )


def buffer_of(message: Any) -> np.ndarray | None:
    """Memory for a payload."""
    nbytes = getattr(message, "nbytes", 0)
    return np.empty(nbytes, np.uint8) if nbytes else None


def refused(client: Rogue) -> None:
    """Push to an exchange that was never opened, and wait until the service ends the job."""
    client.say(Push(1 << 40, 1, 0, 0, turn=0), np.ones(0, np.uint8))
    while not isinstance(client.connection.receive(buffer_of), Failed):
        pass


def hear(client: Rogue) -> bool:
    """Read the messages that have arrived, and return whether the job continues."""
    with contextlib.suppress(BlockingIOError):
        while client.connection.has_ahead or client.connection.sock.recv(1, socket.MSG_PEEK):
            if isinstance(client.connection.receive(buffer_of), Failed):
                return False
        return False
    return True


def join(service: Service, rng: np.random.Generator, job: str) -> list[Rogue]:
    """All clients of a new job; or fewer: some die before."""
    size = int(rng.integers(1, 4))
    clients = []
    for rank in range(size):
        sock = Address(service.server.bound).connect()
        client = Rogue(Connection(sock, FromService, 20.0))
        clients.append(client)
        greet(client.connection, job=job, rank=rank, clients=size)
        client.sent += 2
    for client in clients:
        if size > 1:
            assert isinstance(client.connection.receive(lambda message: None), Welcome)
        client.attach()
    return clients


def run(service: Service, count: int, folder: str) -> tuple[int, int, int]:
    """Return messages, jobs, and jobs that the service ended."""
    rng = np.random.default_rng(SEED)
    sent = jobs = told = 0
    while sent < count:
        jobs += 1
        clients = join(service, rng, f"job {jobs}")
        lost = (OSError, EOFError, StalledError, FrameError, msgspec.MsgspecError)
        for _ in range(int(rng.integers(1, 120))):
            client = clients[rng.integers(len(clients))]
            try:
                speak(rng, client, folder)
                if rng.random() < 0.3 and not hear(client):
                    told += 1
                    break
            except lost:
                told += 1
                break
        else:
            with contextlib.suppress(ConnectionError, EOFError):  # after a Leave
                refused(clients[0])
                told += 1
        for at in rng.permutation(len(clients)):
            client = clients[at]
            with contextlib.suppress(*lost):
                match rng.integers(4):
                    case 0:
                        client.say(Leave())
                    case 1:
                        client.connection.sock.send(b"NSC1\x05")
                    case 2:
                        hear(client)
            client.connection.close()
        sent += sum(each.sent for each in clients)
    return sent, jobs, told


@pytest.mark.parametrize("tcp", [False, pytest.param(True, id="tcp")])
@pytest.mark.parametrize("count", [1500, pytest.param(100_000, marks=pytest.mark.deep)])
def test_what_clients_say_is_felt_in_their_jobs_alone(serve, tmp_path, caplog, count, tcp) -> None:
    print(f"seed {SEED}")
    service = serve(2, tcp=tcp)
    before = Left.of(service)
    with caplog.at_level(logging.ERROR), recorded(), beside(service) as sums:
        sent, jobs, told = run(service, count, str(tmp_path))
        deadline = time.monotonic() + BOUND_S
        first = sums()
        while sums() < first + 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    service.wait_idle()
    check_left(service, before)
    assert sent >= count
    assert jobs >= told > jobs // 2
    assert not caplog.records  # nothing that the service did not expect
