"""Event loop of the service's sockets: accepts clients, does handshakes, receives messages."""

from __future__ import annotations

import contextlib
import hmac
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from nearstep.coarse.service import messages
from nearstep.coarse.service.errors import FrameError, HandshakeError, StalledError
from nearstep.coarse.service.handshake import nonce, proof
from nearstep.coarse.service.session import Session
from nearstep.coarse.service.shared_memory import SharedMemoryError
from nearstep.coarse.service.wire import MAX_MESSAGE_BYTES, MAX_STRANGER_BYTES, Connection

HANDSHAKE_S = 30.0
"""Limit of the time for a handshake."""

MAX_STRANGERS = 64
"""Maximum number of connections without a finished handshake; others wait in the backlog."""

PATIENCE_S = 2.0
"""Age of an unfinished handshake that is ended for a new connection at the maximum."""

BULK_BYTES = 1 << 18
"""Least remaining size of a payload that is received or sent in a thread of its own."""

TICK_S = 0.1
"""Seconds between checks for connections without progress."""

Kind = TypeVar("Kind")
Greeting = Generator[None, messages.Message, Session]


@dataclass(frozen=True)
class Disconnected:
    """A client's connection has ended."""

    reason: str


@dataclass(eq=False)
class Peer:
    """A connection, and its state in the loop.

    Attributes
    ----------
    since : time at which the connection was accepted.
    greeting : the handshake: a generator that is sent messages and returns the session.
    session : None before the end of the handshake.
    filling : whether a thread receives a payload.
    waiting : whether the loop waits until the socket accepts posted bytes.
    """

    connection: Connection
    since: float
    greeting: Greeting
    session: Session | None = None
    filling: bool = False
    waiting: bool = False


class Sockets:
    """Listeners and connections; `turn` handles those that are ready.

    The dispatcher's thread calls `turn` between its tasks. During a long task the thread of `live`
    calls it, so that clients still get signs of life and can send.

    Parameters
    ----------
    token : shared secret of service and clients.
    nearby : name of the Unix socket, among the listeners, for TCP clients on this machine.
    silence_s : limit of the seconds without progress of a started frame.
    heard : called with each message of a client, first its `Hello`, and last a `Disconnected`.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        token: str,
        nearby: str | None,
        silence_s: float,
        heard: Callable[[Session, messages.Message | Disconnected], None],
    ) -> None:
        self.listeners = listeners
        self.token = token
        self.nearby = nearby
        self.silence_s = silence_s
        self.peers: dict[int, Peer] = {}
        self._heard = heard
        self._turning = threading.Lock()
        self._changing = threading.Lock()
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._filled: deque[Peer] = deque()
        self._listening: dict[int, socket.socket] = {}
        self._ticked = 0.0
        for each in listeners:
            each.setblocking(False)

    @property
    def strangers(self) -> list[Peer]:
        """Connections with an unfinished handshake, the oldest first."""
        return [each for each in list(self.peers.values()) if each.session is None]

    def wake(self) -> None:
        """End a waiting turn; from any thread."""
        with self._changing:
            if not self._epoll.closed:
                os.eventfd_write(self._wake, 1)

    def turn(self, seconds: float) -> None:
        """Receive available input and send posted bytes; wait at most `seconds` for either."""
        with self._turning:
            self._turn(seconds)

    def live(self, stopped: threading.Event, beat_s: float) -> None:
        """Take turns while no other thread does, until `stopped` is set."""
        while not stopped.wait(beat_s / 2):
            if self._turning.acquire(blocking=False):
                try:
                    if not stopped.is_set():  # `close` may have had its turn since the wait
                        self._turn(0.0)
                finally:
                    self._turning.release()
                self.wake()  # the thread that was busy may be about to wait

    def _turn(self, seconds: float) -> None:
        if time.monotonic() - self._ticked > TICK_S:
            self._tick()
        for number, events in self._epoll.poll(seconds):
            if (peer := self.peers.get(number)) is not None:
                if events & select.EPOLLOUT:
                    peer.connection.flush()
                if events & ~select.EPOLLOUT and not peer.filling:
                    self._take(peer)
            elif (listener := self._listening.get(number)) is not None:
                self._accept(listener)
            elif number == self._wake:
                os.eventfd_read(self._wake)
        while self._filled:
            peer = self._filled.popleft()
            if peer.connection.sock.fileno() in self.peers:
                self._arm(peer, filling=False)
                self._take(peer)

    def _arm(self, peer: Peer, *, filling: bool | None = None, waiting: bool | None = None) -> None:
        """Change the events that the loop waits for on a connection; from any thread."""
        with self._changing:
            peer.filling = peer.filling if filling is None else filling
            peer.waiting = peer.waiting if waiting is None else waiting
            events = 0 if peer.filling else select.EPOLLIN
            self._epoll.modify(
                peer.connection.sock, events | (select.EPOLLOUT if peer.waiting else 0)
            )

    def _backlog(self, peer: Peer, waits: bool) -> None:
        """Send a backlog of posted bytes, in the loop or in a thread, or stop doing so."""
        bulk = waits and peer.connection.left_bytes >= BULK_BYTES
        if not (bulk and _in_thread(peer.connection.drain)) and peer.waiting != waits:
            self._arm(peer, waiting=waits)

    def _fill(self, peer: Peer) -> None:
        """Receive the rest of a payload, in a thread."""
        peer.connection.fill()
        self._filled.append(peer)
        self.wake()

    def _tick(self) -> None:
        """End connections without progress; accept others up to the limit of strangers."""
        self._ticked = time.monotonic()
        for peer in list(self.peers.values()):
            try:
                if not peer.filling:
                    peer.connection.check_moving()
            except StalledError as error:
                self._refuse(peer, error)
        self._make_room()

    def _make_room(self) -> None:
        """Listen below the limit of strangers; at the limit, end the oldest one past its time."""
        strangers = self.strangers
        if full := len(strangers) >= MAX_STRANGERS:
            oldest = strangers[0]
            if time.monotonic() - oldest.since > PATIENCE_S:
                oldest.connection.end()
        self._listen(not full)

    def _listen(self, wanted: bool) -> None:
        if wanted == bool(self._listening):
            return
        for each in self.listeners:
            if wanted:
                self._listening[each.fileno()] = each
                self._epoll.register(each, select.EPOLLIN)
            else:
                del self._listening[each.fileno()]
                self._epoll.unregister(each)

    def _accept(self, listener: socket.socket) -> None:
        try:
            sock, _ = listener.accept()
        except BlockingIOError:
            return
        except OSError:  # out of descriptors: listen again when a connection has ended
            return self._listen(False)
        try:
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._epoll.register(sock, select.EPOLLIN)
        except OSError:  # the client has closed the socket, or the limit of epoll is reached
            return sock.close()
        connection = Connection(sock, messages.FromClient, self.silence_s)
        connection.deadline = time.monotonic() + min(self.silence_s, HANDSHAKE_S)
        connection.max_message_bytes = MAX_STRANGER_BYTES
        greeting = self._greet(connection)
        next(greeting)
        peer = self.peers[sock.fileno()] = Peer(connection, time.monotonic(), greeting)
        connection.on_backlog = partial(self._backlog, peer)
        return self._make_room()

    def _take(self, peer: Peer) -> None:
        """Receive and handle a client's available messages."""
        connection = peer.connection
        try:
            while True:
                session = peer.session
                message = connection.take(session.buffer_of if session else lambda _: None)
                if message is None:
                    if connection.missing >= BULK_BYTES:
                        self._arm(peer, filling=True)
                        if not _in_thread(partial(self._fill, peer)):
                            self._arm(peer, filling=False)
                    return
                if session is not None:
                    session.note(message)
                if isinstance(message, messages.Beat):
                    if session is not None:
                        with contextlib.suppress(OSError):  # its end is reported elsewhere
                            connection.send_if_free(message)
                elif session is not None:
                    self._heard(session, message)
                else:
                    self._go_on(peer, message)
                if not connection.has_ahead:
                    return
        except (FrameError, HandshakeError, SharedMemoryError, StalledError) as error:
            self._refuse(peer, error)
        except EOFError:
            self._drop(peer, "closed its connection")
        except OSError as error:
            self._drop(peer, f"lost its connection: {error}")
        except Exception as error:
            self._drop(peer, f"sent a message that failed: {type(error).__name__}: {error}")

    def _go_on(self, peer: Peer, message: messages.Message) -> None:
        """Continue a handshake."""
        try:
            peer.greeting.send(message)
        except StopIteration as ended:
            peer.session = session = ended.value
            peer.connection.deadline = None
            peer.connection.max_message_bytes = MAX_MESSAGE_BYTES
            self._heard(session, session.hello)
            self._make_room()

    def _greet(self, connection: Connection) -> Greeting:
        """Do the handshake with a client; signs of life are left out.

        Raises
        ------
        HandshakeError : wrong version or token, or an unexpected message.
        """
        hello = _expect(messages.Hello, (yield))
        if hello.version != messages.VERSION:
            raise HandshakeError(f"expected version {messages.VERSION}, found {hello.version}")
        asked = messages.Challenge(nonce())
        connection.post(asked)
        said = _expect(messages.Proof, (yield))
        if not hmac.compare_digest(said.digest, proof(self.token, "client", hello, asked.nonce)):
            raise HandshakeError("the token is wrong")
        digest = proof(self.token, "service", hello, asked.nonce)
        if self.nearby is not None and not connection.is_shared:
            connection.post(messages.Nearby(self.nearby, digest))
            _expect(messages.Stay, (yield))
        return Session(connection, hello, digest)

    def _refuse(self, peer: Peer, error: Exception) -> None:
        """Send a client the error that it caused, and end its connection."""
        kind = "HandshakeError" if peer.session is None else "RefusedError"
        peer.connection.post(messages.Failed(kind, str(error)[:8000], [], []))
        self._drop(peer, f"broke the protocol: {error}")

    def _drop(self, peer: Peer, reason: str) -> None:
        """Close a connection, and report its end."""
        if self.peers.pop(peer.connection.sock.fileno(), None) is None:
            return
        peer.connection.close()  # the kernel removes a closed socket from epoll
        if peer.session is not None:
            self._heard(peer.session, Disconnected(reason))
        self._make_room()

    def close(self, seconds: float) -> None:
        """Stop listening, send posted bytes for at most `seconds`, and end all connections."""
        with self._turning:
            self._listen(False)
            for each in self.listeners:
                each.close()
            self.listeners = ()
            for peer in list(self.peers.values()):
                peer.connection.finish()
            deadline = time.monotonic() + seconds
            while self.peers and time.monotonic() < deadline:
                self._turn(TICK_S)
            for peer in list(self.peers.values()):
                self._drop(peer, "was ended")
            with self._changing:
                self._epoll.close()
                os.close(self._wake)


def _in_thread(action: Callable[[], None]) -> bool:
    """Run `action` in a new thread; return False if the thread cannot be started."""
    try:
        threading.Thread(target=action, name="coarse bulk", daemon=True).start()
    except RuntimeError:
        return False
    return True


def _expect(kind: type[Kind], message: messages.Message) -> Kind:
    """Return the message, or raise `HandshakeError` if it is of another type."""
    if not isinstance(message, kind):
        raise HandshakeError(f"expected {kind.__name__}, found {type(message).__name__}")
    return message
