"""The server of vfio-user, with a function that copies within memory of the guest."""

from __future__ import annotations

import errno
import os
import random
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from nearstep.errors import ArgumentError, MismatchError
from nearstep.linux.pci import DmaError, Identity, Msix, PciFunction
from nearstep.linux.vfio_user import MESSAGE_BYTES, Server

from . import client as vfio
from .client import HELLO, Client

IDENTITY = Identity(vendor=0x1234, device=0x5678, class_code=0x058000, revision=7)
VECTORS = 4


class Copier(PciFunction):
    """BAR 0 is memory; a write to its last word copies 16 bytes from one address to another."""

    def __init__(self) -> None:
        msix = Msix(vectors=VECTORS, bar=0, table=0x800, pending=0xC00)
        super().__init__(IDENTITY, {0: 4096, 2: 1 << 16}, msix)
        self.bar = bytearray(4096)
        self.resets = 0
        self.errors: list[DmaError] = []

    def read_bar(self, number: int, offset: int, nbytes: int) -> bytes:
        return bytes(self.bar[offset : offset + nbytes]) if number == 0 else bytes(nbytes)

    def write_bar(self, number: int, offset: int, data: bytes) -> None:
        if number == 0:
            self.bar[offset : offset + len(data)] = data
            if offset == 4092:
                self.go(*struct.unpack_from("<QQ", self.bar))

    def go(self, source: int, target: int) -> None:
        try:
            self.dma_write(target, self.dma_read(source, 16))
            self.bus.interrupt(1)
        except DmaError as error:
            self.errors.append(error)

    def reset(self) -> None:
        super().reset()
        self.resets += 1

    def close(self) -> None:
        pass


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Copier, Path]]:
    function, path = Copier(), tmp_path / "s"
    server = Server(function, path)
    thread = threading.Thread(target=server.serve)
    thread.start()
    yield function, path
    server.stop()
    thread.join(30)
    assert not thread.is_alive()
    assert not path.exists()


@pytest.fixture
def client(served: tuple[Copier, Path]) -> Iterator[Client]:
    made = Client(served[1])
    yield made
    made.close()


def test_configuration_space_identifies_the_function_and_keeps_what_is_read_only(
    client: Client,
) -> None:
    config = client.read(7, 0, 256)
    assert struct.unpack_from("<HH", config) == (0x1234, 0x5678)
    assert config[8:12] == bytes([7, 0x00, 0x80, 0x05])
    client.write(7, 0, b"\xff" * 256)
    after = client.read(7, 0, 256)
    assert after[:4] == config[:4]
    assert after[4:6] == b"\x06\x04"
    bars = struct.unpack_from("<6I", after, 0x10)
    assert bars == (0xFFFFF004, 0xFFFFFFFF, 0xFFFF0004, 0xFFFFFFFF, 0, 0)
    assert after[0x40] == 0x11
    assert struct.unpack_from("<HII", after, 0x42) == (0xC000 | VECTORS - 1, 0x800, 0xC00)
    assert after[0x3C] == 0xFF


def test_device_regions_and_interrupts_are_described(client: Client) -> None:
    info = client.call(vfio.DEVICE, struct.pack("<IIII", 16, 0, 0, 0)).body
    assert struct.unpack("<IIII", info) == (16, 3, 9, 5)
    found = []
    for index in range(9):
        body = client.call(vfio.REGION, struct.pack("<IIIIQQ", 32, 0, index, 0, 0, 0)).body
        found.append(struct.unpack("<IIIIQQ", body)[4])
    assert found == [4096, 0, 1 << 16, 0, 0, 0, 0, 256, 0]
    counts = [
        struct.unpack("<IIII", client.call(vfio.IRQ, struct.pack("<IIII", 16, 0, index, 0)).body)[3]
        for index in range(5)
    ]
    assert counts == [0, 0, VECTORS, 0, 0]


def test_memory_is_that_of_the_maps_and_vectors_are_eventfds(
    served: tuple[Copier, Path], client: Client
) -> None:
    function, _ = served
    fd, event = client.memfd(3 * 4096), client.eventfd()
    assert client.map(0x10000, 4096, fd, offset=4096) == 0
    assert client.map(0x11000, 4096, fd, offset=0) == 0  # neighbours: an access may span both
    body = struct.pack("<IIIII", 20, 4 | 32, 2, 1, 1)
    assert client.call(vfio.SET_IRQS, body, (event,)).error == 0
    os.pwrite(fd, bytes(range(16)), 4096)
    client.write(0, 0, struct.pack("<QQ", 0x10000, 0x10FF8))
    client.write(0, 4092, bytes(4))
    assert len(function.errors) == 1  # it must not master the bus yet
    client.write(7, 4, b"\x06\x00")
    client.write(0, 4092, bytes(4))
    assert len(function.errors) == 1
    assert os.pread(fd, 8, 2 * 4096 - 8) + os.pread(fd, 8, 0) == bytes(range(16))
    assert os.eventfd_read(event) == 1
    for source, target in ((0x9FF8, 0x10000), (0x10000, 0x11FF8), (1 << 60, 0x10000)):
        client.write(0, 0, struct.pack("<QQ", source, target))
        client.write(0, 4092, bytes(4))
    assert len(function.errors) == 4
    os.truncate(fd, 4096)  # a mapping would now end the server by a signal
    client.write(0, 0, struct.pack("<QQ", 0x10000, 0x11000))
    client.write(0, 4092, bytes(4))
    client.write(0, 0, struct.pack("<QQ", 0x11000, 0x10000))
    client.write(0, 4092, bytes(4))
    assert len(function.errors) == 6
    assert client.unmap(0x11000, 4096) == 4096
    client.write(0, 4092, bytes(4))
    assert len(function.errors) == 7
    assert client.unmap(0, 0, flags=2) == 4096  # all
    function.bus.interrupt(1)
    assert os.eventfd_read(event) == 1
    assert client.map(0x10000, 4096, fd) == 0
    assert client.call(vfio.SET_IRQS, struct.pack("<IIIII", 20, 1 | 32, 2, 0, 0)).error == 0
    function.bus.interrupt(1)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(event)


def test_wrong_maps_are_refused(client: Client, tmp_path: Path) -> None:
    fd = client.memfd(2 * 4096)
    plain = os.open(tmp_path, os.O_RDONLY)
    readable = os.open(tmp_path / "f", os.O_RDONLY | os.O_CREAT)
    os.truncate(tmp_path / "f", 4096)
    wrong = [
        client.map(0, 0, fd), client.map(0, 3 * 4096, fd), client.map(0, 4096, fd, offset=8192),
        client.map((1 << 64) - 4096, 8192, fd), client.map(0, 4096, fd, flags=4),
        client.map(0, 4096, plain), client.call(vfio.MAP, bytes(31)).error,
        client.call(vfio.MAP, struct.pack("<IIQQQ", 32, 3, 0, 0, 4096), (fd, fd)).error,
    ]  # fmt: skip
    assert wrong == [errno.EINVAL] * 8
    assert client.map(0, 4096, readable) == errno.EACCES
    assert client.map(0x1000, 4096, fd) == 0
    assert client.map(0x5000, 4096, None) == 0  # a ROM: nothing can access it
    assert client.map(0, 2 * 4096, fd) == errno.EEXIST
    assert client.map(0x1800, 2048, fd) == errno.EEXIST
    assert client.unmap(0x3000, 4096) == 0  # nothing is mapped there
    assert client.unmap(0x1000, 2048) == -errno.EINVAL
    assert client.unmap(0x1000, 0) == -errno.EINVAL
    assert client.unmap(0x0, 0x10000) == 2 * 4096
    wrong = [client.unmap(0, 4096, 2), client.unmap(4096, 0, 2), client.unmap(0, 0, 3)]
    assert wrong == [-errno.EINVAL] * 3
    os.close(plain)
    os.close(readable)


def test_wrong_accesses_and_interrupts_are_refused(client: Client) -> None:
    event, other = client.eventfd(), client.memfd(8)
    irqs = [(32 | 4, 2, 3, 2, (event, event)), (32 | 4, 2, 0, 2, (event,)),
            (32 | 4, 1, 0, 1, (event,)),
            (32 | 4, 2, 0, 1, (other,)), (32 | 5, 2, 0, 1, (event,)), (8 | 1, 2, 0, 1, ()),
            (32 | 2, 2, 0, 1, ()), (32 | 1, 9, 0, 0, ()), (0, 2, 0, 0, ())]  # fmt: skip
    for flags, index, start, count, fds in irqs:
        body = struct.pack("<IIIII", 20, flags, index, start, count)
        assert client.call(vfio.SET_IRQS, body, fds).error == errno.EINVAL
    accesses = [(0, 0, 0), (0, 4095, 2), (1, 0, 4), (6, 0, 4), (7, 255, 2), (9, 0, 4),
                (1 << 31, 0, 1), (0, 1 << 63, 4), (2, 0, (1 << 20) + 1)]  # fmt: skip
    for region, offset, count in accesses:
        body = struct.pack("<QII", offset, region, count)
        assert client.call(vfio.READ, body).error == errno.EINVAL
        assert client.call(vfio.WRITE, body).error == errno.EINVAL
    assert client.call(vfio.WRITE, struct.pack("<QII", 0, 0, 4) + b"12345").error == errno.EINVAL
    for unknown in (0, 6, 11, 12, 15, 16, 17, 99, 0xFFFF, vfio.VERSION):
        assert client.call(unknown, HELLO).error == errno.EINVAL
    assert client.read(0, 0, 4) == bytes(4)


def test_no_reply_and_many_messages_at_once(client: Client) -> None:
    """Posted writes are not answered, and messages are answered in order."""
    for number in range(8):
        body = struct.pack("<QII", 4 * number, 0, 4) + struct.pack("<I", number)
        client.send(vfio.WRITE, body, flags=1 << 4)
    client.send(vfio.WRITE, struct.pack("<QII", 1 << 40, 0, 4), flags=1 << 4)  # an error, too
    sent = [client.send(vfio.READ, struct.pack("<QII", 4 * n, 0, 4)) for n in range(8)]
    for number in range(8):
        found = client.receive()
        assert found is not None
        assert found[0] == sent[number]
        assert found[2].body[16:] == struct.pack("<I", number)


def test_a_reset_and_another_client(served: tuple[Copier, Path], client: Client) -> None:
    function, path = served
    client.write(7, 4, b"\x06\x00")
    assert client.call(vfio.RESET).error == 0
    assert function.resets == 1
    assert client.read(7, 4, 2) == b"\0\0"
    client.map(0, 4096, client.memfd(4096))
    client.close()
    again = Client(path)
    assert again.unmap(0, 4096) == 0  # the first client's memory is forgotten
    assert function.resets == 2
    again.close()


@pytest.mark.parametrize("hello", [
    b"", b"\0", struct.pack("<HH", 1, 0) + b"{}\0", struct.pack("<HH", 0, 1) + b"{",
    b"\0\0\0\0[1]\0", b"\0\0\0\0\xff\xfe\0", b"\0\0\0\0" + b"[" * 100_000,
])  # fmt: skip
def test_a_wrong_version_ends_the_connection(served: tuple[Copier, Path], hello: bytes) -> None:
    made = Client(served[1], hello=None)
    reply = made.call(vfio.VERSION, hello)
    assert reply.error == errno.EINVAL
    assert made.is_closed
    made.close()


@pytest.mark.parametrize(
    ("size", "flags"), [(0, 0), (15, 0), (MESSAGE_BYTES + 1, 0), (16, 1), (16, 2)]
)
def test_what_is_no_message_ends_the_connection(
    served: tuple[Copier, Path], size: int, flags: int
) -> None:
    made = Client(served[1])
    made.send(vfio.RESET, size=size, flags=flags)
    assert made.is_closed
    made.close()
    early = Client(served[1], hello=None)
    early.send(vfio.RESET)
    assert early.is_closed
    early.close()


def test_random_messages_are_answered_or_end_the_connection(served: tuple[Copier, Path]) -> None:
    _, path = served
    draw = random.Random(47)
    answered = refused = ended = 0
    made = Client(path)
    for _ in range(3000):
        fds = tuple(made.eventfd() for _ in range(draw.choice((0, 0, 0, 0, 1, 2))))
        body = draw.randbytes(draw.choice((0, 4, 16, 20, 24, 32, draw.randrange(64))))
        if draw.random() < 0.7:  # small numbers reach further
            words = [draw.choice((0, 1, 2, 4, 7, 32, 36, 4096)) for _ in range(len(body) // 4)]
            body = struct.pack(f"<{len(words)}I", *words)
        size = None if draw.random() < 0.98 else draw.randrange(16)
        made.send(draw.choice((*range(2, 14), 99)), body, fds, size=size)
        found = made.receive()
        if found is None:
            ended += 1
            made.close()
            made = Client(path)
        elif found[2].error:
            refused += 1
        else:
            answered += 1
    made.close()
    assert answered + refused + ended == 3000
    assert min(answered, refused, ended) > 20
    again = Client(path)
    assert again.read(7, 0, 2) == b"\x34\x12"
    again.close()


def test_files_and_sockets_of_others_are_not_removed(
    served: tuple[Copier, Path], tmp_path: Path
) -> None:
    with pytest.raises(MismatchError):
        Server(Copier(), served[1])
    (tmp_path / "f").write_text("mine")
    with pytest.raises(MismatchError):
        Server(Copier(), tmp_path / "f")
    assert (tmp_path / "f").read_text() == "mine"


@pytest.mark.parametrize("answer", [None, errno.EACCES, errno.ECONNREFUSED])
def test_a_socket_is_removed_if_nobody_listens_alone(
    answer: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(path))
        if answer == errno.ECONNREFUSED:  # by Linux
            Server(Copier(), path)._listener.close()
            return
        other.listen(0)
        if answer is not None:  # what Linux does not answer to root
            monkeypatch.setattr(socket.socket, "connect_ex", lambda *_: answer)
        for _ in range(3):  # more than can wait
            with pytest.raises(MismatchError):
                Server(Copier(), path)
        assert path.is_socket()


def test_a_path_that_is_too_long_is_said(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 108)
    with pytest.raises(OSError, match="AF_UNIX path too long") as caught:
        Server(Copier(), path)
    assert (caught.value.errno, caught.value.filename) == (errno.ENAMETOOLONG, str(path))


@pytest.mark.parametrize("bars", [{1: 4096}, {0: 2048}, {0: 6000}])
def test_impossible_bars_are_refused(bars: dict[int, int]) -> None:
    class Other(Copier):
        def __init__(self) -> None:
            PciFunction.__init__(self, IDENTITY, bars, Msix(vectors=1, bar=0, table=0, pending=64))

    with pytest.raises(ArgumentError):
        Other()
