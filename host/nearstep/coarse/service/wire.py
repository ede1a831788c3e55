"""Frames on a socket: messages, payloads and, on Unix sockets, file descriptors.

A frame is the four bytes `NSC1`, the sizes of the message (4 bytes) and of the payload (8 bytes),
both little endian, the message in MessagePack, and the payload.
"""

from __future__ import annotations

import array
import contextlib
import os
import re
import select
import socket
import stat
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.service.errors import FrameError, StalledError
from nearstep.coarse.service.messages import Message, union
from nearstep.errors import ArgumentError

MAGIC = b"NSC1"
HEADER = struct.Struct("<4sIQ")
MAX_MESSAGE_BYTES = 1 << 20
MAX_REQUEST_BYTES = 1 << 19
"""Maximum size of a request: the answer to `Load` has the names of a `Save`, and sizes."""

MAX_STRANGER_BYTES = 1 << 12
"""Maximum size of a message before the sender has proved that it knows the token."""

AHEAD_BYTES = 1 << 12
"""Minimum size of a receive at the start of a frame."""

MAX_DESCRIPTORS = 8
BACKLOG = 256
MAX_PARTS = 64
"""Maximum number of buffers in a call of `sendmsg`."""

MAX_LEFT = 1 << 16
"""Maximum number of buffers queued for a peer that receives nothing."""

SLICE_S = 0.2
"""Interval at which a wait checks whether the connection was closed."""

BufferOf = Callable[[Any], "NDArray[np.uint8] | None"]
"""Returns the buffer for the payload of a message; None if it must have no payload."""


ADDRESS = re.compile(
    r"unix:(?P<path>.+)|tcp:(\[(?P<six>.+)\]|(?P<host>[^:\[\]]+)):(?P<port>\d+)", re.DOTALL
)


def check_message(message: Message, max_bytes: int) -> None:
    """Raise `ArgumentError` for a message that the other end would not accept."""
    kind, body = type(message), msgspec.msgpack.encode(message)
    if len(body) > max_bytes:
        raise ArgumentError(f"{kind.__name__} must have at most {max_bytes} bytes, not {len(body)}")
    try:
        msgspec.msgpack.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise ArgumentError(f"{kind.__name__}: {error}") from error


class Address:
    """An address to listen at: `unix:PATH`, `tcp:HOST:PORT` or, for IPv6, `tcp:[HOST]:PORT`.

    `unix:@NAME` is a socket without a file.

    Raises
    ------
    ArgumentError : `text` is no such address.
    """

    def __init__(self, text: str) -> None:
        found = ADDRESS.fullmatch(text)
        if found is None or int(found["port"] or 0) >= 1 << 16:
            raise ArgumentError(
                f"address must be unix:PATH, tcp:HOST:PORT or tcp:[HOST]:PORT, not {text!r}"
            )
        path = found["path"]
        self.place: str | tuple[str, int] = "\0" + path[1:] if path and path[0] == "@" else path
        if not path:
            self.place = found["six"] or found["host"], int(found["port"])
        self.text = text

    @property
    def is_shared(self) -> bool:
        """Whether both ends are on this machine and can share memory."""
        return isinstance(self.place, str)

    @property
    def is_reached(self) -> bool:
        """Whether this machine can connect to the address."""
        try:
            self.connect().close()
        except OSError:
            return False
        return True

    def listen(self) -> socket.socket:
        """Return a listening socket; a socket file left by a killed process is removed first."""
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
        """Remove a socket file that no process listens at."""
        if os.path.exists(place) and stat.S_ISSOCK(os.stat(place).st_mode):
            with socket.socket(socket.AF_UNIX) as probe, contextlib.suppress(BlockingIOError):
                probe.setblocking(False)
                try:
                    probe.connect(place)
                except ConnectionRefusedError:
                    os.unlink(place)

    def connect(self) -> socket.socket:
        """Return a socket connected to the address."""
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
    """One end of a connection; any thread may send or `end` it, one at a time receives.

    An end either uses `send`, which waits for the socket, or `post`, with a loop that calls
    `flush`.

    Parameters
    ----------
    sock : connected socket, owned by the connection from here on.
    expected : base of the messages that the peer sends.
    silence_s : limit of the seconds without progress of a started frame, in either direction.

    Attributes
    ----------
    is_shared : whether both ends are on this machine and can share memory.
    deadline : time (`time.monotonic`) after which receiving fails; None: no limit.
    heard : time of the last message.
    missing : bytes of the current payload that are not received yet.
    closed : whether the connection has ended.
    meanwhile : called while `send` waits, also when there is something to receive.
    on_backlog : called with True when posted frames start to wait for the socket, and with False
        when all have been sent.
    """

    def __init__(self, sock: socket.socket, expected: type[Message], silence_s: float) -> None:
        self.sock = sock
        self.is_shared = sock.family == socket.AF_UNIX
        self.silence_s = silence_s
        self.deadline: float | None = None
        self.meanwhile: Callable[[], None] | None = None
        self.on_backlog: Callable[[bool], None] = lambda waits: None
        self.max_message_bytes = MAX_MESSAGE_BYTES
        self.descriptors: list[int] = []
        self.heard = time.monotonic()
        self.missing = 0
        self._whole: Any = None
        self._failure: Exception | None = None
        self._control_bytes = socket.CMSG_SPACE(4 * MAX_DESCRIPTORS) if self.is_shared else 0
        self._buffer_of: BufferOf = lambda message: None
        self._ahead = bytearray()
        self._incoming = self._messages()
        self._begun: float | None = None  # time of the last bytes of an unfinished frame
        self._decoder = msgspec.msgpack.Decoder(union(expected))
        self._encoder = msgspec.msgpack.Encoder()
        self._lock = threading.Lock()
        self._left: deque[memoryview] = deque()
        self._rights: list[int] = []  # copies of descriptors, sent with the first byte of `_left`
        self._taken = time.monotonic()  # time at which the socket last accepted bytes
        self._finishing = False
        self.closed = False
        sock.setblocking(False)

    def send(
        self,
        message: Message,
        payload: NDArray[np.uint8] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Send a frame, and wait until the socket has accepted all of it."""
        with self._lock:
            if self.closed:
                raise ConnectionResetError("closed")
            self._send_left()  # so that descriptors accompany their own message
            self._left.extend(self._frame(message, payload))
            self._rights += map(os.dup, descriptors)
            self._send_left()

    def _send_left(self) -> None:
        """Wait until the socket has accepted all queued bytes."""
        self._taken = time.monotonic()
        self._flush()
        while self._left:
            event = select.POLLOUT | (0 if self.meanwhile is None else select.POLLIN)
            self._await(event, self._taken)
            if self.meanwhile is not None:
                self.meanwhile()
                if time.monotonic() - self._taken > self.silence_s:
                    raise StalledError(self.silence_s)
            self._flush()

    def post(
        self,
        message: Message,
        payload: NDArray[np.uint8] | None = None,
        descriptors: Sequence[int] = (),
    ) -> None:
        """Queue a frame and send what the socket accepts at once; `flush` sends the rest.

        The payload must not change until it has been sent. An error of the socket ends the
        connection.
        """
        with self._lock:
            if self.closed or self._finishing:
                return
            waited = bool(self._left)
            self._left.extend(self._frame(message, payload))
            self._rights += map(os.dup, descriptors)
            if len(self._left) > MAX_LEFT:
                self.end()
            elif not waited:
                self._taken = time.monotonic()
                self._flush_or_end()
                if self._left:
                    self.on_backlog(True)

    def flush(self) -> None:
        """Send as many posted bytes as the socket accepts; called by a loop or `drain`."""
        with self._lock:
            self._flush_or_end()
            if not self._left:
                self.on_backlog(False)
                if self._finishing:
                    self.end()

    def finish(self) -> None:
        """End the connection once all posted frames have been sent."""
        with self._lock:
            self._finishing = True
            if not self._left:
                self.end()

    @property
    def left_bytes(self) -> int:
        """Posted bytes that the socket has not accepted."""
        return sum(map(len, self._left))

    def drain(self) -> None:
        """Send all posted frames, waiting for the socket; runs in a thread of its own."""
        while self._left and not self.closed:
            with contextlib.suppress(ConnectionResetError, ValueError):  # ended meanwhile
                if self._await(select.POLLOUT, None):
                    self.flush()

    def fill(self) -> None:
        """Receive the rest of the current payload; `take` then returns its message, or raises.

        Runs in a thread of its own, while no other thread receives.
        """
        try:
            while self.missing:
                self._whole = self._next()
                if self._whole is None:
                    self._await(select.POLLIN, self._begun)
        except Exception as error:
            self._failure, self.missing = error, 0

    @property
    def has_ahead(self) -> bool:
        """Whether bytes of the next message are already buffered."""
        return bool(self._ahead)

    def check_moving(self) -> None:
        """Raise `StalledError` if a frame makes no progress or the deadline has passed; end the
        connection if the peer accepts no posted bytes."""
        now = time.monotonic()
        late = self.deadline is not None and now > self.deadline
        if late or (self._begun is not None and now - self._begun > self.silence_s):
            raise StalledError(self.silence_s)
        if self._left and now - self._taken > self.silence_s:
            self.end()

    def _frame(self, message: Message, payload: NDArray[np.uint8] | None) -> list[memoryview]:
        body = self._encoder.encode(message)
        size = 0 if payload is None else payload.size
        head = memoryview(HEADER.pack(MAGIC, len(body), size) + body)
        return [head] if not size or payload is None else [head, payload.data]

    def _flush(self) -> None:
        """Send as many queued bytes as the socket accepts without waiting."""
        with contextlib.suppress(BlockingIOError):
            while self._left:
                sent = self._sendmsg([*islice(self._left, MAX_PARTS)], self._rights)
                self._taken = time.monotonic()
                self._close_rights()
                while self._left and sent >= len(self._left[0]):
                    sent -= len(self._left.popleft())
                if sent:
                    self._left[0] = self._left[0][sent:]

    def _close_rights(self) -> None:
        while self._rights:
            os.close(self._rights.pop())

    def _flush_or_end(self) -> None:
        try:
            self._flush()
        except OSError:
            self._left.clear()
            self.end()

    def _sendmsg(self, parts: Sequence[memoryview], descriptors: Sequence[int] = ()) -> int:
        """Call `sendmsg` once; return the number of bytes that the socket accepted."""
        rights = array.array("i", descriptors)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)] if descriptors else []
        return self.sock.sendmsg(parts, control)

    def send_if_free(self, message: Message) -> None:
        """Send a message, such as a sign of life, unless the connection is busy sending."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self.closed:
                raise ConnectionResetError("closed")
            waited = bool(self._left)
            if not waited:
                self._left.extend(self._frame(message, None))
                self._taken = time.monotonic()
            self._flush()
            if self._left and not waited:
                self.on_backlog(True)
        finally:
            self._lock.release()

    def receive(self, buffer_of: BufferOf) -> Any:
        """Wait for the next message; the payload is received into the buffer from `buffer_of`."""
        while (message := self.take(buffer_of)) is None:
            self.await_input(SLICE_S)
        return message

    def take(self, buffer_of: BufferOf) -> Any:
        """Return the next message, or None while it is incomplete; raises as `receive`."""
        self._buffer_of = buffer_of
        if (message := self._whole) is None:
            message = self._next()
        self._whole = None
        return message

    def _next(self) -> Any:
        """Receive available bytes; after an error, raise the same error again."""
        if self._failure is None:
            try:
                return next(self._incoming)
            except Exception as error:
                self._failure = error
                self.missing = 0
        raise self._failure

    def await_input(self, seconds: float) -> bool:
        """Wait at most `seconds` for input; return whether there is some."""
        return self._await(select.POLLIN, self._begun, seconds)

    def _messages(self) -> Iterator[Any]:
        """Yield received messages, and None whenever the socket has no more bytes."""
        while True:
            yield from self._get_ahead(HEADER.size)
            magic, length, size = HEADER.unpack_from(self._ahead)
            if magic != MAGIC:
                raise FrameError(f"a frame to begin with {MAGIC!r}", repr(bytes(magic)))
            if length > self.max_message_bytes:
                raise FrameError(
                    f"a message of at most {self.max_message_bytes} bytes", f"{length}"
                )
            yield from self._get_ahead(HEADER.size + length)
            body = self._ahead[HEADER.size : HEADER.size + length]
            del self._ahead[: HEADER.size + length]
            try:
                message = self._decoder.decode(body)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise FrameError("a message of the protocol", str(error)) from None
            place = self._buffer_of(message)
            room = 0 if place is None else place.size
            if room != size:
                raise FrameError(f"a payload of {room} bytes", f"{size}")
            if place is not None:
                yield from self._fill(place.data)
            self.heard = now = time.monotonic()
            self._begun = now if self._ahead else None
            yield message

    def _get_ahead(self, nbytes: int) -> Iterator[None]:
        """Receive until at least `nbytes` bytes are buffered."""
        while len(self._ahead) < nbytes:
            room = bytearray(max(AHEAD_BYTES, nbytes - len(self._ahead)))
            count = yield from self._receive_into(memoryview(room))
            self._ahead += room[:count]

    def _fill(self, room: memoryview) -> Iterator[None]:
        """Receive until `room` is full."""
        count = min(len(room), len(self._ahead))
        room[:count] = self._ahead[:count]
        del self._ahead[:count]
        self.missing = len(room) - count
        while self.missing:
            self.missing -= yield from self._receive_into(room[-self.missing :])

    def _receive_into(self, room: memoryview) -> Generator[None, None, int]:
        """Receive some bytes; return their number."""
        while True:
            if self.deadline is not None and time.monotonic() > self.deadline:
                raise StalledError(self.silence_s)
            try:
                count, control, _, _ = self.sock.recvmsg_into([room], self._control_bytes)
                break
            except BlockingIOError:
                yield None
        for _, _, data in control:
            self.descriptors += array.array("i", data[: len(data) // 4 * 4])
        if len(self.descriptors) > MAX_DESCRIPTORS:
            raise FrameError(f"at most {MAX_DESCRIPTORS} descriptors", f"{len(self.descriptors)}")
        if not count:
            raise EOFError("the other end has closed the connection")
        self._begun = time.monotonic()
        return count

    def _await(self, event: int, since: float | None, seconds: float = SLICE_S) -> bool:
        """Wait at most `seconds` for `event` on the socket; return whether it occurred."""
        if self.closed:
            raise ConnectionResetError("closed")
        poll = select.poll()
        poll.register(self.sock, event)
        # A process that was stopped during the wait polls again: input may have arrived.
        if poll.poll(1000 * seconds) or poll.poll(0):
            return True
        if since is not None and time.monotonic() - since > self.silence_s:
            raise StalledError(self.silence_s)
        return False

    def take_descriptor(self) -> int:
        """Return the descriptor received with the last message; the caller owns it."""
        if not self.descriptors:
            raise FrameError("1 file descriptor with the message", "0")
        return self.descriptors.pop(0)

    def check_descriptors(self) -> None:
        """Raise `FrameError` if a descriptor belongs to no message."""
        if self.descriptors and not self._ahead:
            raise FrameError("no further file descriptors", f"{len(self.descriptors)}")

    def end(self) -> None:
        """Shut both directions down, from any thread; all waits on the connection end.

        The socket is not closed: its number must not be reused while a thread uses it.
        """
        self.closed = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End the connection and close the socket; only in the receiving thread, or after its end.

        A second call does nothing.
        """
        self.end()
        with self._lock:
            self.sock.close()
            self._left.clear()
            self._close_rights()
        for each in self.descriptors:
            os.close(each)
        self.descriptors = []
