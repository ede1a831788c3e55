"""Who has not shown that it knows the token, and where clients may save and load."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.service import Client, Server, folder, key_value
from nearstep.coarse.service import sockets as module
from nearstep.coarse.service.errors import HandshakeError, RefusedError
from nearstep.coarse.service.messages import (
    Challenge,
    Failed,
    FromClient,
    FromService,
    Nearby,
    Welcome,
)
from nearstep.coarse.service.wire import HEADER, MAGIC, MAX_STRANGER_BYTES, Address, Connection
from nearstep.errors import ArgumentError

from .conftest import TOKEN, greet
from .dying import Left, beside, check_left, recorded, session

BOUND_S = 30.0


def wait_for(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + BOUND_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(sock: socket.socket) -> bytes:
    """What a service says until it ends a connection, in bounded time."""
    sock.settimeout(BOUND_S)
    said = b""
    try:
        while more := sock.recv(4096):
            said += more
    except ConnectionResetError:
        pass
    return said


def test_strangers_have_bounded_memory_and_give_way(serve, monkeypatch) -> None:
    monkeypatch.setattr(module, "MAX_STRANGERS", 8)
    monkeypatch.setattr(module, "PATIENCE_S", 0.5)
    service = serve(2, tcp=True)
    before = Left.of(service)
    with recorded(), beside(service) as sums:
        wait_for(lambda: sums() > 0)
        strangers = [Address(service.server.bound).connect() for _ in range(40)]
        for each in strangers:
            each.sendall(HEADER.pack(MAGIC, MAX_STRANGER_BYTES, 0))
        assert len(service.run(2, session)) == 2
        assert len(service.server._sockets.strangers) <= 8
        first = sums()
        for each in strangers[:30]:
            ended(each)
        assert len(service.server._sockets.strangers) <= 8
        wait_for(lambda: sums() > first)
        for each in strangers:
            each.close()
    check_left(service, before)


def test_a_stranger_cannot_announce_much(serve) -> None:
    with Address(serve(2, tcp=True).server.bound).connect() as sock:
        sock.sendall(HEADER.pack(MAGIC, MAX_STRANGER_BYTES + 1, 0))
        assert f"at most {MAX_STRANGER_BYTES} bytes".encode() in ended(sock)


def test_a_byte_now_and_then_keeps_no_place(serve, monkeypatch) -> None:
    monkeypatch.setattr(module, "HANDSHAKE_S", 0.5)
    with Address(serve(2, tcp=True).server.bound).connect() as sock:
        sock.sendall(HEADER.pack(MAGIC, MAX_STRANGER_BYTES, 0))
        deadline = time.monotonic() + BOUND_S
        sent = 0
        try:
            while time.monotonic() < deadline:
                sock.sendall(b"x")
                sent += 1
                time.sleep(0.02)
        except OSError:
            pass
        assert 0 < sent < MAX_STRANGER_BYTES
        assert time.monotonic() < deadline


def test_the_token_does_not_cross_the_wire_and_a_service_has_to_know_it() -> None:
    heard = []

    def imitate(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        with closing(Connection(sock, FromClient, BOUND_S)) as connection:
            heard.append(connection.receive(lambda message: None))
            connection.send(Challenge(b"n" * 32))
            heard.append(connection.receive(lambda message: None))
            connection.send(Welcome("golden:coarse", 2, 2048, 1, 1.0, b"d" * 32))
            time.sleep(0.1)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=imitate, args=(listener,))
        thread.start()
        place = f"tcp:127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(HandshakeError, match="does not know the token"):
            Client(place, TOKEN, job="a", rank=0, clients=1)
        thread.join()
    assert len(heard) == 2
    assert TOKEN not in repr(heard)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "[::]"])
def test_addresses_of_both_families(host) -> None:
    try:
        pool = CoarsePool.open("golden:coarse?devices=2")
        server = Server(pool, f"tcp:{host}:0", TOKEN)
    except OSError as error:
        pytest.skip(f"this machine has no {host}: {error}")
    with server:
        port = server.bound.rpartition(":")[2]
        reached = [host] if host != "[::]" else ["[::1]", "127.0.0.1"]
        assert server.bound.count("[") == host.count("[")
        for each in reached:
            with Client(f"tcp:{each}:{port}", TOKEN, job=each, rank=0, clients=1) as client:
                client.barrier()


@pytest.mark.parametrize("reached", [2, 1, 0])
def test_clients_of_tcp_on_this_machine_share_memory(serve, monkeypatch, reached: int) -> None:
    """All of them, one of two, or none, as on another machine."""
    service, connect, near = serve(2, tcp=True, share_memory=True), Address.connect, set[str]()

    def elsewhere(address: Address) -> socket.socket:
        if address.text.startswith("unix:"):
            near.add(address.text)
            if (threading.current_thread().name.endswith("_1") and reached < 2) or not reached:
                raise ConnectionRefusedError("another machine")
        return connect(address)

    def action(client: Client) -> tuple[bool, float]:
        exchange = client.exchange(3000)
        out = np.empty(3000, np.float32)
        exchange.reduce(np.full(3000, client.rank + 1, np.float32), out)
        exchange.close()
        return client._replies.is_shared, float(out.sum())

    monkeypatch.setattr(Address, "connect", elsewhere)
    found = service.run(2, action)
    assert sorted(shared for shared, _ in found) == [False] * (2 - reached) + [True] * reached
    assert [total for _, total in found] == [9000.0] * 2
    service.wait_idle()
    (place,) = near
    with pytest.raises(HandshakeError, match="the token is wrong"):  # not by its name alone
        Client(f"tcp:{service.server.bound.partition(':')[2]}", "x", job="a", rank=0, clients=1)
    monkeypatch.undo()
    with pytest.raises(HandshakeError, match="the token is wrong"):
        Client(place, "x", job="a", rank=0, clients=1)


def test_who_does_not_know_the_token_is_told_of_no_socket(serve) -> None:
    service = serve(2, tcp=True, share_memory=True)
    for token, kind in (("x", Failed), (TOKEN, Nearby)):
        sock = Address(service.server.bound).connect()
        with closing(Connection(sock, FromService, BOUND_S)) as mine:
            assert isinstance(greet(mine, token=token), kind)


@pytest.mark.parametrize("text", ["tcp:::1:5", "tcp:[]:5", "tcp:a:70000", "tcp:a", "unix:", "a"])
def test_addresses_that_are_none(text) -> None:
    with pytest.raises(ArgumentError, match="address must be"):
        Address(text)


def test_clients_save_and_load_in_the_folder_of_the_service_alone(serve, tmp_path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    outside.mkdir()
    (inside / "way out").symlink_to(outside)
    (inside / "linked").symlink_to(outside / "x")
    os.mkfifo(inside / "pipe")
    service, without = serve(2, snapshots=inside), serve(2, snapshots=None)

    def action(client: Client) -> int:
        client.keep("a", np.arange(9, dtype=np.uint8))
        refused = 0
        ways_out = outside / "x", inside / ".." / "x", inside / "way out" / "x", "/x", "\0"
        for place in (*ways_out, inside, inside / ".." / "in"):
            for act in (lambda path: client.save(path, ["a"]), client.load):
                with pytest.raises(RefusedError, match="path must"):
                    act(str(place))
                refused += 1
        for place in (inside / "linked", inside / "pipe"):
            with pytest.raises(RefusedError):
                client.load(str(place))
            refused += 1
        assert client.save(str(inside / "x"), ["a"]) == str(inside / "x.000001")
        assert client.load(str(inside / "x")) == {"a": 9}
        return refused

    assert service.run(1, action) == [16]
    assert not [*outside.iterdir()]
    assert {each.name for each in tmp_path.iterdir()} >= {"in", "out"}

    def nowhere(client: Client) -> None:
        client.keep("a", np.arange(9, dtype=np.uint8))
        with pytest.raises(RefusedError, match="must have a folder for snapshots"):
            client.save(str(inside / "y"), ["a"])

    without.run(1, nowhere)


def test_a_file_that_is_slow_to_read_stops_no_other_job(serve, tmp_path, monkeypatch) -> None:
    service = serve(2)
    go_on = threading.Event()
    load: Callable[..., key_value.Arrays] = key_value.load

    def slow(*arguments) -> key_value.Arrays:
        assert go_on.wait(BOUND_S)
        return load(*arguments)

    monkeypatch.setattr(key_value, "load", slow)

    def action(client: Client) -> dict[str, int]:
        client.keep("a", np.arange(9, dtype=np.uint8))
        client.save(str(tmp_path / "x"), ["a"])
        return client.load(str(tmp_path / "x"))

    with beside(service) as sums:
        found: list[object] = []
        thread = threading.Thread(target=lambda: found.extend(service.run(1, action)))
        thread.start()
        wait_for(lambda: bool([*tmp_path.glob("x.*")]))
        first = sums()
        wait_for(lambda: sums() > first + 3)
        assert not found
        go_on.set()
        thread.join(BOUND_S)
        assert found == [{"a": 9}]


def test_signs_of_life_take_no_turn_after_the_end() -> None:
    """The thread's wait may have ended just before all is stopped."""
    sockets = module.Sockets([], TOKEN, None, BOUND_S, lambda *_: None)
    waits = []

    class Late(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout)
            if len(waits) == 1:
                self.set()
                sockets.close(0.0)
                return False
            return True

    sockets.live(Late(), 1.0)
    assert len(waits) == 2


def test_a_socket_that_is_left_is_taken_and_one_in_use_is_not(tmp_path) -> None:
    place = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(place))
    with Server(CoarsePool.open("golden:coarse?devices=2"), f"unix:{place}", TOKEN) as server:
        pool = CoarsePool.open("golden:coarse?devices=2")
        with pytest.raises(OSError, match="in use"):
            Server(pool, f"unix:{place}", TOKEN)
        pool.close()
        with Client(server.bound, TOKEN, job="a", rank=0, clients=1) as client:
            client.barrier()
    assert not place.exists()
    place.write_text("of somebody")
    with pytest.raises(OSError, match="in use"):
        Address(f"unix:{place}").listen()
    assert place.read_text() == "of somebody"


def test_folders_of_services_that_were_killed_are_removed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(folder.tempfile, "tempdir", str(tmp_path))
    left, other = tmp_path / f"{folder.PREFIX}left", tmp_path / "another"
    for each in (left, other):
        each.mkdir()
        (each / "socket").touch()
    linked = tmp_path / f"{folder.PREFIX}linked"
    linked.symlink_to(other)
    with folder.temporary_folder() as first:
        assert not left.exists()
        with folder.temporary_folder() as second:
            assert first.exists()
            assert second != first
        assert not second.exists()
    remaining = {Path(each).name for each in tmp_path.iterdir()}
    assert remaining == {"another", linked.name}
    assert (other / "socket").exists()
