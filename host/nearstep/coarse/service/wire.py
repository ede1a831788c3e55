"""Frames on a socket: messages, payloads and, on Unix sockets, file descriptors.

A frame is four bytes `NSC1`, the bytes of the message and of the payload (both little endian, of 4
and 8 bytes), the message in MessagePack, and the payload.
"""

from __future__ import annotations

import array
import contextlib
import os
import select
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.service.errors import FrameError, StalledError
from nearstep.coarse.service.messages import Message
from nearstep.errors import ArgumentError

MAGIC = b"NSC1"
HEADER = struct.Struct("<4sIQ")
MAX_MESSAGE_BYTES = 1 << 20
MAX_STRANGER_BYTES = 1 << 12
"""Of a message, until it is known who sends it."""

MAX_DESCRIPTORS = 8
BACKLOG = 256
MAX_LEFT = 1 << 16
"""Parts of frames that may wait for a connection that takes nothing."""

SLICE_S = 0.2
"""A wait looks this often whether the connection was closed meanwhile."""

Landing = Callable[[Any], "NDArray[np.uint8] | None"]
"""Where the payload of a message goes; None if it must have none."""


class Address:
    """A place to listen at: `unix:PATH` or `tcp:HOST:PORT`, of IPv6 `tcp:[HOST]:PORT`.

    `unix:@NAME` is a socket without a file.

    Raises
    ------
    ArgumentError : it is neither.
    """

    def __init__(self, text: str) -> None:
        kind, _, rest = text.partition(":")
        host, _, port = rest.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        self.place: str | tuple[str, int]
        if kind == "unix" and rest:
            self.place = "\0" + rest[1:] if rest[0] == "@" else rest
        elif (
            kind == "tcp"
            and bare
            and (bare != host or ":" not in host)
            and port.isdecimal()
            and int(port) < 1 << 16
        ):
            self.place = (bare, int(port))
        else:
            raise ArgumentError(
                f"address must be unix:PATH, tcp:HOST:PORT or tcp:[HOST]:PORT, not {text!r}"
            )
        self.text = text

    @property
    def is_shared(self) -> bool:
        """Whether both ends are on this machine and can share memory."""
        return isinstance(self.place, str)

    @property
    def is_reached(self) -> bool:
        """Whether something listens there, as far as this machine sees."""
        try:
            self.connect().close()
        except OSError:
            return False
        return True

    def listen(self) -> socket.socket:
        """A socket that listens there; that of a process that was killed is removed."""
        if not isinstance(self.place, str):
            family, _, _, _, place = socket.getaddrinfo(
                *self.place, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )[0]
            both = self.place[0] == "::" and socket.has_dualstack_ipv6()
            return socket.create_server(
                place[:2], family=family, backlog=BACKLOG, dualstack_ipv6=both
            )
        has_file = self.place[0] != "\0"
        if has_file:
            self._remove_stale(self.place)
        made = socket.socket(socket.AF_UNIX)
        try:
            made.bind(self.place)
            if has_file:
                os.chmod(self.place, 0o600)
            made.listen(BACKLOG)
        except BaseException:
            made.close()
            raise
        return made

    @staticmethod
    def _remove_stale(place: str) -> None:
        """Remove a socket that nobody listens at."""
        if os.path.exists(place) and stat.S_ISSOCK(os.stat(place).st_mode):
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(BlockingIOError):
                probe.setblocking(False)
                try:
                    probe.connect(place)
                except ConnectionRefusedError:
                    os.unlink(place)

    def connect(self) -> socket.socket:
        """A socket that is connected to there."""
        if not isinstance(self.place, str):
            made = socket.create_connection(self.place)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return made
        made = socket.socket(socket.AF_UNIX)
        try:
            made.connect(self.place)
        except BaseException:
            made.close()
            raise
        return made

    def __str__(self) -> str:
        return self.text


class Connection:
    """One end of a connection. Any thread may send or `end` it; one thread receives, and closes.

    Parameters
    ----------
    sock : connected; it belongs to the connection from here on.
    expected : union of the messages that the other end sends.
    silence_s : seconds that a started frame, in either direction, may stand still.

    Attributes
    ----------
    is_shared : whether both ends are on this machine and can share memory.
    deadline : of all that is received, if there is one.
    meanwhile : called while `send` waits, and when there is something to receive.
    """

    def __init__(self, sock: socket.socket, expected: Any, silence_s: float) -> None:
        self.sock = sock
        self.is_shared = sock.family == socket.AF_UNIX
        self.silence_s = silence_s
        self.deadline: float | None = None
        self.meanwhile: Callable[[], None] | None = None
        self.max_message_bytes = MAX_MESSAGE_BYTES
        self.descriptors: list[int] = []
        self.heard = time.monotonic()
        self._control_bytes = socket.CMSG_SPACE(4 * MAX_DESCRIPTORS) if self.is_shared else 0
        self._landing: Landing = lambda message: None
        self._incoming = self._messages()
        self._begun: float | None = None  # when something of an unfinished frame came
        self._decoder = msgspec.msgpack.Decoder(expected)
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._left: deque[memoryview] = deque()
        self._draining = False
        self._finishing = False
        self._closed = False
        sock.setblocking(False)

    def send(
        self,
        message: Message,
        payload: NDArray[np.uint8] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send a frame."""
        with self._lock:
            if self._closed:
                raise ConnectionResetError("closed")
            for part in self._frame(message, payload):
                self._send(part, descriptors)
                descriptors = ()

    def post(self, message: Message, payload: NDArray[np.uint8] | None = None) -> None:
        """Send a frame, without waiting: what the socket does not take a thread sends later.

        The payload must not change until then. Where a connection takes nothing for `silence_s`
        it is ended. An end that posts does not `send`.
        """
        with self._lock:
            if self._closed or self._finishing:
                return
            self._left.extend(self._frame(message, payload))
            if len(self._left) > MAX_LEFT or not self._flush():
                self.end()
            elif self._left and not self._draining:
                self._draining = True
                threading.Thread(target=self._drain, name="coarse sender", daemon=True).start()

    def finish(self) -> None:
        """`end` when all that was posted has been sent."""
        with self._lock:
            self._finishing = True
            if not self._left:
                self.end()

    @property
    def is_finished(self) -> bool:
        """Whether it has ended."""
        return self._closed

    def _frame(self, message: Message, payload: NDArray[np.uint8] | None) -> list[memoryview]:
        body = self._encoder.encode(message)
        size = 0 if payload is None else payload.size
        head = memoryview(HEADER.pack(MAGIC, len(body), size) + body)
        return [head] if not size or payload is None else [head, payload.data]

    def _flush(self) -> bool:
        """Send what the socket takes at once; False if the connection is gone."""
        try:
            while self._left:
                sent = self.sock.send(self._left[0])
                self._left[0] = self._left[0][sent:]
                if not self._left[0]:
                    self._left.popleft()
        except BlockingIOError:
            return True
        except OSError:
            return False
        return True

    def _drain(self) -> None:
        """Send what was posted and could not be sent at once."""
        last, left = time.monotonic(), -1
        while True:
            with self._lock:
                alive = not self._closed and self._flush()
                if alive and not self._left:
                    self._draining = False
                    alive = not self._finishing
                    if alive:
                        return
                size = sum(map(len, self._left))  # others post meanwhile
            now = time.monotonic()
            if size != left:
                last, left = now, size
            if not alive or now - last > self.silence_s:
                return self.end()
            with contextlib.suppress(ConnectionResetError, ValueError):  # ended meanwhile
                self._await(select.POLLOUT, None)

    def send_if_free(self, message: Message) -> None:
        """Send a frame unless that would block: what is on its way is a sign of life, too."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._closed:
                raise ConnectionResetError("closed")
            poll = select.poll()
            poll.register(self.sock, select.POLLOUT)
            if not self._left and poll.poll(0):
                for part in self._frame(message, None):
                    self._send(part, ())
        finally:
            self._lock.release()

    def _send(self, data: memoryview, descriptors: Sequence[int]) -> None:
        last = time.monotonic()
        while data:
            try:
                if descriptors:
                    sent = socket.send_fds(self.sock, [data], list(descriptors))
                    descriptors = ()
                else:
                    sent = self.sock.send(data)
                data = data[sent:]
                last = time.monotonic()
            except BlockingIOError:
                if self.meanwhile is None:
                    self._await(select.POLLOUT, last)
                else:
                    self._await(select.POLLOUT | select.POLLIN, last)
                    self.meanwhile()
                    if time.monotonic() - last > self.silence_s:
                        raise StalledError(self.silence_s) from None

    def receive(self, landing: Landing) -> Any:
        """Wait for the next message; its payload lies where `landing` says."""
        while (message := self.take(landing)) is None:
            self.await_input(SLICE_S)
        return message

    def take(self, landing: Landing) -> Any:
        """Return the next message, or None while not all of it is there; raises as `receive`."""
        self._landing = landing
        try:
            return next(self._incoming)
        except StopIteration:  # it has failed before
            raise EOFError("the other end has closed the connection") from None

    def await_input(self, seconds: float) -> bool:
        """Wait so long for something to receive; whether there is something."""
        return self._await(select.POLLIN, self._begun, seconds)

    def _messages(self) -> Iterator[Any]:
        """What comes, message by message; None whenever there is nothing to receive."""
        while True:
            head = bytearray(HEADER.size)
            yield from self._fill(memoryview(head))
            magic, length, size = HEADER.unpack(head)
            if magic != MAGIC:
                raise FrameError(f"a frame to begin with {MAGIC!r}", repr(bytes(magic)))
            if length > self.max_message_bytes:
                raise FrameError(
                    f"a message of at most {self.max_message_bytes} bytes", f"{length}"
                )
            body = bytearray(length)
            yield from self._fill(memoryview(body))
            try:
                message = self._decoder.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise FrameError("a message of the protocol", str(error)) from None
            place = self._landing(message)
            room = 0 if place is None else place.size
            if room != size:
                raise FrameError(f"a payload of {room} bytes", f"{size}")
            if place is not None:
                yield from self._fill(place.data)
            self.heard, self._begun = time.monotonic(), None
            yield message

    def _fill(self, room: memoryview) -> Iterator[None]:
        """Receive until `room` is full."""
        while room:
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise StalledError(self.silence_s)
            try:
                count, control, _, _ = self.sock.recvmsg_into([room], self._control_bytes)
            except BlockingIOError:
                yield None
                continue
            for _, _, data in control:
                self.descriptors += array.array("i", data[: len(data) // 4 * 4])
            if len(self.descriptors) > MAX_DESCRIPTORS:
                raise FrameError(
                    f"at most {MAX_DESCRIPTORS} descriptors", f"{len(self.descriptors)}"
                )
            if not count:
                raise EOFError("the other end has closed the connection")
            room, self._begun = room[count:], time.monotonic()

    def _await(self, event: int, since: float | None, seconds: float = SLICE_S) -> bool:
        """Wait a while for a socket that can go on; whether it can."""
        if self._closed:
            raise ConnectionResetError("closed")
        poll = select.poll()
        poll.register(self.sock, event)
        # A process that was stopped meanwhile looks again: what came then is there.
        if poll.poll(1000 * seconds) or poll.poll(0):
            return True
        if since is not None and time.monotonic() - since > self.silence_s:
            raise StalledError(self.silence_s)
        return False

    def check_descriptors(self, expected: int) -> None:
        """Raise `FrameError` unless so many descriptors came with the last message."""
        if len(self.descriptors) != expected:
            raise FrameError(
                f"{expected} file descriptors beside the message", f"{len(self.descriptors)}"
            )

    def take_descriptor(self) -> int:
        """The descriptor that came with the last message; it belongs to the caller."""
        return self.descriptors.pop(0)

    def end(self) -> None:
        """End the connection, in both directions, from any thread: what waits for it goes on.

        The socket stays open: its number must not be another's while a thread uses it.
        """
        self._closed = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """`end`, and give the socket back, in the thread that receives, or when that has ended.

        Closing twice does nothing.
        """
        self.end()
        with self._lock:
            self.sock.close()
        for each in self.descriptors:
            os.close(each)
        self.descriptors = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
