"""Clients that say what they must not: they are named to the others, and nobody else is hurt."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from contextlib import closing
from typing import Any

import msgspec
import numpy as np
import pytest

from nearstep.coarse.service.arena import SLAB_BYTES
from nearstep.coarse.service.errors import (
    ClientLostError,
    DeviceLostError,
    DeviceMemoryError,
    HandshakeError,
    JobError,
    UnlikeError,
)
from nearstep.coarse.service.job import TrainingJob
from nearstep.coarse.service.messages import (
    VERSION,
    Attach,
    Barrier,
    Check,
    Close,
    FromService,
    Get,
    Hello,
    Open,
    Probe,
    Proof,
    Push,
    Put,
    Welcome,
)
from nearstep.coarse.service.session import Session
from nearstep.coarse.service.shared_memory import SharedMemory, SharedMemoryError
from nearstep.coarse.service.wire import HEADER, MAGIC, Address, Connection

from .conftest import TOKEN, Service, greet
from .dying import Left, beside, check_left, recorded, session

KINDS = [False, pytest.param(True, id="tcp")]


def connect(service: Service) -> Connection:
    return Connection(Address(service.server.bound).connect(), FromService, 20.0)


def refusal(service: Service, **changes: Any) -> str:
    """What the service answers to such a handshake."""
    with closing(connect(service)) as connection:
        failed = greet(connection, **{"clients": 2} | changes)
        failed = failed or connection.receive(lambda message: None)
        with pytest.raises((EOFError, OSError)):
            connection.receive(lambda message: None)
    assert failed.kind == HandshakeError.__name__
    return failed.detail


def test_a_hello_that_is_wrong_is_refused_and_says_why(serve) -> None:
    service = serve(2)
    before = Left.of(service)
    assert refusal(service, token="x") == "the token is wrong"
    newer = VERSION + 1
    text = f"expected version {VERSION}, found {newer}"
    assert refusal(service, version=newer) == text
    assert "rank must be from 0 to 1" in refusal(service, rank=2)
    with closing(connect(service)) as first:
        greet(first, clients=2)
        while not service.server.dispatcher.jobs:
            time.sleep(0.001)
        assert refusal(service) == "job 'a' has a client 0"
        assert refusal(service, rank=1, clients=3) == "job 'a' has 2 clients, not 3"
    for early in (Barrier(1), Proof(b"x")):
        with closing(connect(service)) as silent:
            silent.send(early)
            assert "expected Hello" in silent.receive(lambda message: None).detail
    service.wait_idle()
    check_left(service, before)


def test_an_older_client_is_refused_by_its_version(serve) -> None:
    fields = {"version": 4, "token": TOKEN, "job": "a", "rank": 0, "clients": 1}
    body = msgspec.msgpack.encode({"type": "Hello"} | fields)
    with closing(connect(serve(2))) as connection:
        connection.sock.send(HEADER.pack(MAGIC, len(body), 0) + body)
        said = connection.receive(lambda message: None)
    assert (said.kind, said.detail) == ("HandshakeError", f"expected version {VERSION}, found 4")


def test_half_a_hello_keeps_no_place(serve) -> None:
    service = serve(2)
    with Address(service.server.bound).connect() as half:
        half.sendall(HEADER.pack(MAGIC, 100, 0) + b"abc")
        assert len(service.run(2, session)) == 2


OPEN = Open(0, 8, "sum", "fp32", 0, 0, 4096)
BAD = {
    "twice": [Barrier(1), OPEN, OPEN],
    "unknown exchange": [Push(5, 1, 0, 0)],
    "unknown shard": [Push(7, 1, 9, 0)],
    "skipped version": [Push(7, 2, 0, 0)],
    "double push": [Push(7, 1, 0, 0), Push(7, 1, 0, 0)],
    "closed unknown": [Close(99)],
    "checks what is not there": [Check(1, 5, 1, "")],
    "checks what updates nothing": [Check(1, 7, 1, "{}")],
    "small segment": [Open(1, 1 << 20, "sum", "fp32", 0, 0, 4096)],
    "huge": [Open(1, 1 << 40, "sum", "fp32", 0, 0, 4096)],
    "no segment": [Put(1, "a", 77, 8)],
    "more than the segment": [Get(1, "a", 0, 1 << 40)],
    "not at a page": [Put(1, "a", 0, 8, 8)],
    "behind the segment": [Get(1, "a", 0, 8, SLAB_BYTES)],
    "place that is taken": [Push(8, 1, 0, 0), Push(8, 1, 4, 0)],
    "segment again": [Attach(0, 4096)],
    "no device": [Probe(1, 0, 0, 4)],
    "opens on no device": [Open(0, 8, "sum", "fp32", 0, 4, 4096)],
    "shards of nothing": [Open(0, 8, "sum", "fp32", 0, 0, 100)],
    "too many shards": [Open(0, 1 << 27, "sum", "fp32", 1, 0, 2048)],
    "greets again": [Hello(VERSION, "a", 0, 2)],
    "shows the token again": [Proof(b"")],
}


@pytest.mark.parametrize("tcp", KINDS)
def test_a_client_that_breaks_the_protocol_is_named_to_the_others(serve, tcp) -> None:
    service = serve(2, tcp=tcp, url="golden:coarse?devices=2&memory_bytes=256MiB")
    before = Left.of(service)
    checked = 0
    with recorded():
        for name, messages in BAD.items():

            def action(client, messages=messages) -> JobError | None:
                client._exchanges = 7
                exchange = client.exchange(8)  # number 7
                client.exchange(8 << 20, shard_bytes=4 << 20)  # 8 shards in 4 places
                assert exchange.number == 7
                try:
                    if client.rank == 0:
                        for each in messages:
                            size = {7: 32, 8: 4 << 20}.get(getattr(each, "exchange", None), 0)
                            inline = not client._replies.is_shared and isinstance(each, Push)
                            if inline and size and each.shard in (0, 4):
                                each = Push(each.exchange, each.version, each.shard, size)
                                client._replies.send(each, np.zeros(size, np.uint8))
                            else:
                                client._replies.send(each)
                    client._replies.answer(1000, "the end")
                except JobError as error:
                    return error
                return None

            told = service.run(2, action)[1]
            assert isinstance(told, ClientLostError), (name, told)
            assert told.ranks == (0,), (name, told)
            assert "broke the protocol" in str(told), (name, told)
            checked += 1
            del told  # it refers to the client
            service.wait_idle()
    assert checked == len(BAD)
    check_left(service, before)
    assert len(service.run(2, session)) == 2


def test_memory_that_could_shrink_is_not_taken(tmp_path) -> None:
    shared = os.memfd_create("plain")
    os.truncate(shared, 4096)
    with pytest.raises(SharedMemoryError, match="sealed"):
        SharedMemory(4096, shared)
    good = SharedMemory(4096)
    with pytest.raises(PermissionError):
        os.truncate(good.descriptor, 0)
    with pytest.raises(SharedMemoryError, match="must have 8192 bytes, not 4096"):
        SharedMemory(8192, os.dup(good.descriptor))
    with pytest.raises(SharedMemoryError):
        SharedMemory(0, os.open(tmp_path, os.O_RDONLY))
    good.close()


@pytest.mark.parametrize("count", [0, 2, 200])
def test_descriptors_that_are_not_due_end_the_connection(serve, count) -> None:
    service = serve(2)
    segment = SharedMemory(4096)
    before = Left.of(service)
    with closing(connect(service)) as connection:
        assert isinstance(greet(connection), Welcome)
        try:
            connection.send(Attach(0, 4096), None, [segment.descriptor] * count)
        except OSError:
            pytest.fail("the kernel takes so many")
        assert "file descriptor" in connection.receive(lambda message: None).detail
    service.wait_idle()
    check_left(service, before)
    segment.close()


def test_unlike_exchanges_are_refused_to_all_and_the_job_goes_on(serve) -> None:
    service = serve(2)

    def action(client) -> int:
        for elements, operation, wire in [
            (8 + client.rank, "sum", "fp32"),
            (8, ["sum", "max"][client.rank], "fp32"),
            (8, "sum", ["fp32", "bf16"][client.rank]),
        ]:
            with pytest.raises(UnlikeError, match=r"clients \[0\].*clients \[1\]"):
                client.exchange(elements, operation, wire)
        return session(client).size

    assert service.run(2, action) == [2100, 2100]


def test_full_memory_is_refused_and_nothing_is_lost(serve) -> None:
    service = serve(2)
    before = Left.of(service)

    def action(client) -> int:
        first = client.exchange(8)
        with pytest.raises(DeviceMemoryError):
            client.exchange(4 << 20)
        with pytest.raises(DeviceMemoryError):
            client.keep("a", np.zeros(8 << 20, np.uint8))
        out = np.empty(8, np.float32)
        first.reduce(np.full(8, 1.5, np.float32), out)
        assert (out == 3).all()
        first.close()
        return session(client).size

    assert service.run(2, action) == [2100, 2100]
    service.wait_idle()
    check_left(service, before)


def test_a_value_of_a_client_that_left_is_not_waited_for(serve) -> None:
    service = serve(2)

    def action(client) -> tuple[int, ...]:
        if client.rank == 0:
            return ()
        with pytest.raises(ClientLostError) as found:
            client.get("never", np.empty(8, np.uint8))
        return found.value.ranks

    assert service.run(2, action) == [(), (0,)]


@pytest.mark.parametrize("dead", range(4))
def test_a_dead_device_is_named_to_all_and_serves_again_when_it_is_back(serve, dead) -> None:
    service = serve(4)
    backend = service.server.dispatcher.pool.device.backend

    def action(client) -> tuple[int, ...]:
        exchange = client.exchange(8)
        client.barrier()
        backend.kill(dead)
        with pytest.raises(DeviceLostError) as found:
            exchange.reduce(np.zeros(8, np.float32), np.empty(8, np.float32))
        return found.value.devices

    for _ in range(2):
        assert service.run(3, action) == [(dead,)] * 3
        backend.revive(dead)
        assert len(service.run(3, session)) == 3


def test_a_request_that_the_service_fails_with_ends_its_job_alone(serve, monkeypatch) -> None:
    service = serve(2)

    def action(client) -> tuple[str, tuple[int, ...]]:
        client.barrier()
        with pytest.raises(JobError) as found:
            client.get("fails" if client.rank else "a", np.empty(8, np.uint8))
        return str(found.value), found.value.ranks

    get = TrainingJob.get

    def failing(job: TrainingJob, session: Session, message: Get) -> None:
        if message.key == "fails":
            raise ZeroDivisionError("on purpose")
        get(job, session, message)

    monkeypatch.setattr(TrainingJob, "get", failing)
    with recorded(), beside(service):
        told = service.run(2, action)
    assert told == [("ZeroDivisionError: on purpose", (1,))] * 2


@pytest.mark.parametrize("clients", [1, 2])
def test_clients_that_push_and_leave_without_waiting_harm_nobody(serve, clients) -> None:
    service = serve(4)
    before = Left.of(service)

    def action(client) -> None:
        exchange = client.exchange(100 * 1024)
        exchange.begin()
        for shard in range(len(exchange.shards)):
            exchange.push(shard)
        client.barrier()  # not for the sums

    with recorded(), beside(service) as sums:
        for _ in range(3):
            service.run(clients, action)
        first = sums()
        wait_until(lambda: sums() > first)
    check_left(service, before)


def mutations(rng: np.random.Generator, corpus: list[bytes]) -> bytes:
    """A frame of noise, or a good one with some bytes changed, cut or repeated."""
    data = bytearray(corpus[rng.integers(len(corpus))])
    match int(rng.integers(5)):
        case 0:
            return rng.bytes(int(rng.integers(1, 200)))
        case 1:
            body = rng.bytes(int(rng.integers(1, 200)))
            return HEADER.pack(MAGIC, len(body), 0) + body
        case 2:
            return bytes(data[: rng.integers(1, len(data))])
        case 3:
            return HEADER.pack(MAGIC, len(data) - HEADER.size, 1 << int(rng.integers(63))) + bytes(
                data[HEADER.size :]
            )
    for _ in range(int(rng.integers(1, 5))):
        data[rng.integers(len(data))] = rng.integers(256)
    return bytes(data)


def good_frames() -> list[bytes]:
    """One of each message that clients send."""
    near, far = socket.socketpair()
    frames = []
    messages = [each for some in BAD.values() for each in some]
    with closing(Connection(near, FromService, 1.0)) as connection, far:
        for each in messages:
            connection.send(each)
            frames.append(far.recv(4096))
    return frames


def wait_until(holds: Callable[[], bool]) -> None:
    """Within a minute."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("tcp", KINDS)
@pytest.mark.parametrize("count", [1000, pytest.param(50_000, marks=pytest.mark.deep)])
def test_garbage_does_not_disturb_a_job_beside_it(serve, count, tcp) -> None:
    print("seed 5")
    rng = np.random.default_rng(5)
    service = serve(2, tcp=tcp)
    corpus = good_frames()
    before = Left.of(service)
    sent = 0
    with recorded(), beside(service) as sums:
        first = sums()
        while sent < count:
            with closing(connect(service)) as connection:
                sock = connection.sock
                try:
                    if rng.integers(2):
                        greet(connection, job=f"{sent}")
                    sock.settimeout(10)
                    for _ in range(int(rng.integers(1, 20))):
                        sent += 1
                        sock.sendall(mutations(rng, corpus))
                except OSError:
                    pass  # it has had enough
        wait_until(lambda: sums() > first)
    service.wait_idle()
    check_left(service, before)
    assert sent >= count
