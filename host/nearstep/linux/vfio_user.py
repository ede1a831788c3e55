"""A vfio-user server: one PCI function for one client, such as QEMU, over a UNIX socket.

Memory of the guest is accessed through the file descriptors of its maps, with `pread` and `pwrite`
of the same pages: a file that the client truncates is an error there, and a signal in a mapping.

Ref: docs/interop/vfio-user.rst of QEMU.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import struct
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from nearstep.errors import MismatchError
from nearstep.linux.pci import CONFIG_BYTES, DmaError, PciFunction, sizes

HEADER = struct.Struct("<HHIII")
MESSAGE_BYTES = (1 << 20) + 64
MESSAGE_FDS = 16
MAPS = 512
CONFIG_REGION, REGIONS = 7, 9
MSIX_KIND, KINDS = 2, 5
REPLY, NO_REPLY, ERROR = 1, 1 << 4, 1 << 5
READS, WRITES = 1, 2
UNMAP_ALL = 2
IRQ_NONE, IRQ_BOOL, IRQ_EVENTFD, IRQ_TRIGGER = 1, 2, 4, 32

Handler = Callable[[bytes, list[int]], bytes]


class _MessageError(Exception):
    """A message that is answered with an error."""

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(frozen=True)
class _Map:
    """Memory of the guest; `fd` is -1 if it is not shared."""

    address: int
    nbytes: int
    rights: int
    fd: int
    offset: int


class GuestMemory:
    """The maps of a client, and the eventfds of its vectors: the bus of a function."""

    def __init__(self, vectors: int) -> None:
        self._lock = threading.Lock()
        self._maps: list[_Map] = []  # by address
        self._events = [-1] * vectors
        self.interrupts = 0

    def add(self, new: _Map) -> None:
        """Add a map, which then has its file descriptor."""
        with self._lock:
            at = bisect_right(self._maps, new.address, key=lambda each: each.address)
            before, behind = self._maps[at - 1 : at] if at else [], self._maps[at : at + 1]
            if any(each.address + each.nbytes > new.address for each in before) or any(
                new.address + new.nbytes > each.address for each in behind
            ):
                raise _MessageError(errno.EEXIST)
            if len(self._maps) >= MAPS:
                raise _MessageError(errno.ENOSPC)
            self._maps.insert(at, new)

    def remove(self, address: int, nbytes: int) -> int:
        """Remove the maps within a range, which must not end inside one, and return their bytes: 0
        if there is none, as an IOMMU of QEMU asks for all addresses."""
        stop = address + nbytes
        with self._lock:
            hit = [e for e in self._maps if e.address < stop and address < e.address + e.nbytes]
            if any(e.address < address or e.address + e.nbytes > stop for e in hit):
                raise _MessageError(errno.EINVAL)
            self._drop(hit)
        return sum(each.nbytes for each in hit)

    def clear(self) -> None:
        """Remove all maps and eventfds."""
        with self._lock:
            self._drop(self._maps)
        self.listen(0, [-1] * len(self._events))

    def _drop(self, maps: Sequence[_Map]) -> None:
        for each in maps:
            if each.fd >= 0:
                os.close(each.fd)
        gone = {id(each) for each in maps}
        self._maps = [each for each in self._maps if id(each) not in gone]

    def _parts(self, action: str, right: int, address: int, nbytes: int) -> list[tuple[_Map, int]]:
        """The maps of a range, each with the number of its bytes."""
        parts, at, stop = [], address, address + nbytes
        while at < stop:
            number = bisect_right(self._maps, at, key=lambda each: each.address) - 1
            found = self._maps[number] if number >= 0 else None
            if found is None or at >= found.address + found.nbytes:
                raise DmaError(action, at, stop - at, "not mapped")
            if found.fd < 0 or not found.rights & right:
                raise DmaError(action, at, stop - at, "not shared, or without that right")
            size = min(stop, found.address + found.nbytes) - at
            parts.append((found, size))
            at += size
        return parts

    def read(self, address: int, nbytes: int) -> bytes:
        with self._lock:
            out = bytearray()
            for found, size in self._parts("read", READS, address, nbytes):
                at = found.offset + address + len(out) - found.address
                try:
                    data = os.pread(found.fd, size, at)
                except OSError as error:
                    raise DmaError("read", address, nbytes, str(error)) from None
                if len(data) != size:
                    raise DmaError("read", address, nbytes, "the file was truncated")
                out += data
            return bytes(out)

    def write(self, address: int, data: bytes) -> None:
        with self._lock:
            done = 0
            for found, size in self._parts("write", WRITES, address, len(data)):
                at = found.offset + address + done - found.address
                if at + size > os.fstat(found.fd).st_size:
                    raise DmaError("write", address, len(data), "the file was truncated")
                try:
                    os.pwrite(found.fd, data[done : done + size], at)
                except OSError as error:
                    raise DmaError("write", address, len(data), str(error)) from None
                done += size

    def listen(self, first: int, fds: Sequence[int]) -> None:
        """Set the eventfds of vectors from `first` on, which the object then has; -1 is none."""
        with self._lock:
            for number, fd in enumerate(fds, first):
                if self._events[number] >= 0:
                    os.close(self._events[number])
                self._events[number] = fd

    def interrupt(self, vector: int) -> None:
        with self._lock:
            if self._events[vector] >= 0:
                self.interrupts += 1
                with suppress(OSError):  # a counter at its limit has not been read: it is pending
                    os.write(self._events[vector], (1).to_bytes(8, "little"))


class Server:
    """Serves a function to one client after the other.

    When a client leaves, the function is reset and the client's memory is given back.

    Parameters
    ----------
    path : of the socket, which is made, and removed at the end.

    Attributes
    ----------
    messages : number of messages so far, by command.

    Raises
    ------
    MismatchError : another file is at the path.
    OSError : the socket cannot be made.
    """

    def __init__(self, function: PciFunction, path: Path) -> None:
        if path.is_socket() and not _is_served(path):
            path.unlink()
        elif path.exists():
            raise MismatchError(
                f"file at {path}", "none, or a socket that nobody serves", "another"
            )
        self.function = function
        self.path = path
        self.messages: dict[int, int] = {}
        self._memory = GuestMemory(function.msix.vectors)
        self._stopped = False
        self._client: socket.socket | None = None
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(path))
        except OSError as error:
            self._listener.close()
            number, reason = error.errno or errno.ENAMETOOLONG, error.strerror or str(error)
            raise OSError(number, reason, str(path)) from None  # a long path has no number
        self._listener.listen(1)
        self._handlers: dict[int, Handler] = {
            1: self._version, 2: self._map, 3: self._unmap, 4: self._device_info,
            5: self._region_info, 7: self._irq_info, 8: self._set_irqs, 9: self._region_read,
            10: self._region_write, 13: self._device_reset,
        }  # fmt: skip

    def serve(self) -> None:
        """Serve until `stop`."""
        function = self.function
        try:
            while not self._stopped:
                try:
                    client, _ = self._listener.accept()
                except OSError:
                    if self._stopped:
                        return
                    raise
                self._client = client
                function.bus = self._memory
                with client:
                    if not self._stopped:
                        self._talk(client)
                self._client = None
                function.reset()
                self._memory.clear()
        finally:
            self._listener.close()
            self.path.unlink(missing_ok=True)

    def stop(self) -> None:
        """End `serve`, from any thread or a signal handler."""
        self._stopped = True
        for each in (self._listener, self._client):
            if each is not None:
                with suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)

    def _talk(self, client: socket.socket) -> None:
        """Answer messages until the client leaves, or sends what is no message."""
        agreed = False
        while True:
            fds: list[int] = []
            try:
                head = _receive(client, HEADER.size, fds)
                if head is None:
                    return
                number, command, size, flags, _ = HEADER.unpack(head)
                if not HEADER.size <= size <= MESSAGE_BYTES or flags & 0xF:
                    return
                body = _receive(client, size - HEADER.size, fds)
                if body is None or (command != 1 and not agreed):
                    return
                self.messages[command] = self.messages.get(command, 0) + 1
                answer, fault = b"", 0
                try:
                    if command not in self._handlers or (command == 1 and agreed):
                        raise _MessageError(errno.EINVAL)
                    answer = self._handlers[command](body, fds)
                    agreed = True
                except _MessageError as refused:
                    fault = refused.number
                except struct.error:
                    fault = errno.EINVAL
                if not flags & NO_REPLY:
                    kind = REPLY | (ERROR if fault else 0)
                    head = HEADER.pack(number, command, HEADER.size + len(answer), kind, fault)
                    client.sendall(head + answer)
                if not agreed:
                    return
            except OSError:  # the client has left
                return
            finally:
                for fd in fds:  # a handler takes those that it keeps
                    os.close(fd)

    def _version(self, body: bytes, fds: list[int]) -> bytes:
        major, minor = struct.unpack_from("<HH", body)
        try:
            text = body[4:].partition(b"\0")[0]
            known = not text or isinstance(json.loads(text), dict)
        except (ValueError, RecursionError):
            raise _MessageError(errno.EINVAL) from None
        if major != 0 or not known:
            raise _MessageError(errno.EINVAL)
        mine = {"max_msg_fds": MESSAGE_FDS, "max_data_xfer_size": self.function.access_bytes,
                "max_dma_maps": MAPS}  # fmt: skip
        answer = json.dumps({"capabilities": mine}).encode() + b"\0"
        return struct.pack("<HH", 0, min(minor, 1)) + answer

    def _map(self, body: bytes, fds: list[int]) -> bytes:
        _, flags, offset, address, nbytes = struct.unpack("<IIQQQ", body)
        wrong = nbytes == 0 or address + nbytes > 1 << 64 or flags & ~(READS | WRITES)
        if wrong or len(fds) > 1:
            raise _MessageError(errno.EINVAL)
        fd = fds[0] if fds else -1
        if fds:
            what = os.fstat(fd)
            if not stat.S_ISREG(what.st_mode) or offset + nbytes > what.st_size:
                raise _MessageError(errno.EINVAL)
            mode = fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE
            if mode == os.O_WRONLY or (flags & WRITES and mode != os.O_RDWR):
                raise _MessageError(errno.EACCES)
        self._memory.add(_Map(address, nbytes, flags, fd, offset))
        fds.clear()
        return b""

    def _unmap(self, body: bytes, fds: list[int]) -> bytes:
        _, flags, address, nbytes = struct.unpack("<IIQQ", body)
        if flags == UNMAP_ALL and address == nbytes == 0:
            nbytes = 1 << 64
        elif flags or nbytes == 0 or address + nbytes > 1 << 64:
            raise _MessageError(errno.EINVAL)
        return struct.pack("<IIQQ", 24, flags, address, self._memory.remove(address, nbytes))

    def _device_info(self, body: bytes, fds: list[int]) -> bytes:
        struct.unpack("<IIII", body)
        return struct.pack("<IIII", 16, 0b11, REGIONS, KINDS)  # can be reset; PCI

    def _region_info(self, body: bytes, fds: list[int]) -> bytes:
        index = struct.unpack("<IIIIQQ", body)[2]
        nbytes = self._region_bytes(index)
        return struct.pack("<IIIIQQ", 32, 0b11 if nbytes else 0, index, 0, nbytes, 0)

    def _irq_info(self, body: bytes, fds: list[int]) -> bytes:
        index = struct.unpack("<IIII", body)[2]
        if index >= KINDS:
            raise _MessageError(errno.EINVAL)
        count = self.function.msix.vectors if index == MSIX_KIND else 0
        return struct.pack("<IIII", 16, 0b1001 if count else 0, index, count)

    def _set_irqs(self, body: bytes, fds: list[int]) -> bytes:
        _, flags, index, start, count = struct.unpack_from("<IIIII", body)
        kind, action, data = flags & 0x7, flags & ~0x7, body[20:]
        limit = self.function.msix.vectors if index == MSIX_KIND else 0
        if index >= KINDS or start + count > limit or kind not in (1, 2, 4) or action != 32:
            raise _MessageError(errno.EINVAL)
        if kind == IRQ_BOOL and len(data) != count:
            raise _MessageError(errno.EINVAL)
        if kind == IRQ_EVENTFD:
            if len(fds) not in (0, count) or not all(map(_is_eventfd, fds)):
                raise _MessageError(errno.EINVAL)
            for fd in fds:
                os.set_blocking(fd, False)
            self._memory.listen(start, fds or [-1] * count)
            fds.clear()
        elif kind == IRQ_NONE and count == 0:
            self._memory.listen(0, [-1] * limit)
        else:
            for number in range(count):
                if kind == IRQ_NONE or data[number]:
                    self._memory.interrupt(start + number)
        return b""

    def _region_read(self, body: bytes, fds: list[int]) -> bytes:
        offset, region, count = struct.unpack("<QII", body)
        self._check_access(region, offset, count)
        if region == CONFIG_REGION:
            return body + self.function.read_config(offset, count)
        return body + self.function.read_bar(region, offset, count)

    def _region_write(self, body: bytes, fds: list[int]) -> bytes:
        offset, region, count = struct.unpack_from("<QII", body)
        self._check_access(region, offset, count)
        data = body[16:]
        if len(data) != count:
            raise _MessageError(errno.EINVAL)
        if region == CONFIG_REGION:
            self.function.write_config(offset, data)
        else:
            self.function.write_bar(region, offset, data)
        return body[:16]

    def _device_reset(self, body: bytes, fds: list[int]) -> bytes:
        self.function.reset()
        return b""

    def _region_bytes(self, index: int) -> int:
        if index >= REGIONS:
            raise _MessageError(errno.EINVAL)
        return CONFIG_BYTES if index == CONFIG_REGION else [*sizes(self.function), 0, 0, 0][index]

    def _check_access(self, region: int, offset: int, count: int) -> None:
        too_many = not 0 < count <= self.function.access_bytes
        if too_many or offset + count > self._region_bytes(region):
            raise _MessageError(errno.EINVAL)


def _is_served(path: Path) -> bool:
    """Whether somebody listens at a socket, maybe with as many clients as can wait, or another
    user."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        return probe.connect_ex(str(path)) not in (errno.ECONNREFUSED, errno.ENOENT)


def _is_eventfd(fd: int) -> bool:
    return os.readlink(f"/proc/self/fd/{fd}") == "anon_inode:[eventfd]"


def _receive(client: socket.socket, nbytes: int, fds: list[int]) -> bytes | None:
    """Receive that many bytes; None at the end. File descriptors that come along are appended."""
    out = bytearray()
    while len(out) < nbytes:
        data, passed, flags, _ = socket.recv_fds(client, nbytes - len(out), MESSAGE_FDS)
        fds += passed
        if not data or flags & socket.MSG_CTRUNC:
            return None
        out += data
    return bytes(out)
