"""A small client of vfio-user."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path
from typing import NamedTuple

HEADER = struct.Struct("<HHIII")
VERSION, MAP, UNMAP, DEVICE, REGION, IRQ, SET_IRQS, READ, WRITE, RESET = (
    1, 2, 3, 4, 5, 7, 8, 9, 10, 13,
)  # fmt: skip
HELLO = struct.pack("<HH", 0, 1) + b'{"capabilities": {"max_msg_fds": 8}}\0'


class Reply(NamedTuple):
    """Body of a reply, or the number of its error."""

    error: int
    body: bytes


class Client:
    """A client that has agreed on the version; closes what it made at the end."""

    def __init__(self, path: Path, *, hello: bytes | None = HELLO) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.socket.settimeout(30)
        self.socket.connect(str(path))
        self._number = 0
        self._fds: list[int] = []
        if hello is not None:
            assert self.call(VERSION, hello).error == 0

    def close(self) -> None:
        self.socket.close()
        while self._fds:
            os.close(self._fds.pop())

    def send(self, command: int, body: bytes = b"", fds: tuple[int, ...] = (), flags: int = 0,
             size: int | None = None) -> int:  # fmt: skip
        """Send a message, and return its number; `size` replaces that in the header."""
        self._number = (self._number + 1) & 0xFFFF
        nbytes = HEADER.size + len(body) if size is None else size
        message = HEADER.pack(self._number, command, nbytes, flags, 0) + body
        if fds:
            sent = socket.send_fds(self.socket, [message], list(fds))
            message = message[sent:]
        if message:
            self.socket.sendall(message)
        return self._number

    def receive(self) -> tuple[int, int, Reply] | None:
        """Number, command and contents of the next reply; None if the server has closed."""
        head = self._exactly(HEADER.size)
        if head is None:
            return None
        number, command, size, flags, error = HEADER.unpack(head)
        assert flags & 0xF == 1
        assert bool(error) == bool(flags & 1 << 5)
        body = self._exactly(size - HEADER.size)
        assert body is not None
        return number, command, Reply(error, body)

    def call(self, command: int, body: bytes = b"", fds: tuple[int, ...] = ()) -> Reply:
        sent = self.send(command, body, fds)
        found = self.receive()
        assert found is not None
        number, answered, reply = found
        assert (number, answered) == (sent, command)
        return reply

    @property
    def is_closed(self) -> bool:
        """Whether the server has closed the connection."""
        return self.receive() is None

    def memfd(self, nbytes: int) -> int:
        fd = os.memfd_create("guest")
        os.truncate(fd, nbytes)
        self._fds.append(fd)
        return fd

    def eventfd(self) -> int:
        fd = os.eventfd(0, os.EFD_NONBLOCK)
        self._fds.append(fd)
        return fd

    def map(self, address: int, nbytes: int, fd: int | None, *, flags: int = 3,
            offset: int = 0) -> int:  # fmt: skip
        """Map memory, and return the error."""
        body = struct.pack("<IIQQQ", 32, flags, offset, address, nbytes)
        return self.call(MAP, body, () if fd is None else (fd,)).error

    def unmap(self, address: int, nbytes: int, flags: int = 0) -> int:
        """Bytes that were mapped, or -errno."""
        reply = self.call(UNMAP, struct.pack("<IIQQ", 24, flags, address, nbytes))
        return -reply.error or int(struct.unpack("<IIQQ", reply.body)[3])

    def read(self, region: int, offset: int, count: int) -> bytes:
        reply = self.call(READ, struct.pack("<QII", offset, region, count))
        assert reply.error == 0
        return reply.body[16:]

    def write(self, region: int, offset: int, data: bytes) -> None:
        assert self.call(WRITE, struct.pack("<QII", offset, region, len(data)) + data).error == 0

    def _exactly(self, nbytes: int) -> bytes | None:
        out = b""
        while len(out) < nbytes:
            try:
                data = self.socket.recv(nbytes - len(out))
            except ConnectionResetError:
                return None
            if not data:
                return None
            out += data
        return out
