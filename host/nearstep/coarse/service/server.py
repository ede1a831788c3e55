"""The service: memory devices for clients in other processes."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import threading
import time
from pathlib import Path
from typing import Self, get_args

from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.routing import SHARD_ALIGNMENT
from nearstep.coarse.service.engine import Disconnected, Engine, Scheduling
from nearstep.coarse.service.errors import FrameError, HandshakeError, StalledError
from nearstep.coarse.service.handshake import nonce, proof
from nearstep.coarse.service.messages import (
    VERSION,
    Beat,
    Challenge,
    Failed,
    FromClient,
    Hello,
    Message,
    Nearby,
    Proof,
    Stay,
)
from nearstep.coarse.service.segment import SegmentError
from nearstep.coarse.service.session import Session
from nearstep.coarse.service.wire import (
    MAX_MESSAGE_BYTES,
    MAX_STRANGER_BYTES,
    Address,
    Connection,
)
from nearstep.errors import ArgumentError
from nearstep.scalars import is_whole

SHARD_BYTES = 4 << 20
"""DMA reaches its full bandwidth from 2 MiB on (COARSE paper, section V-B and figure 14); golden
devices on two cores are a fifth faster with 4 MiB."""

QUEUE_SHARDS = 4096
BEAT_S = 1.0
SILENCE_S = 60.0
HANDSHAKE_S = 30.0
"""At most, until a client has shown that it knows the token."""

MAX_STRANGERS = 64
"""Connections of those who have not; others wait in the backlog."""

PATIENCE_S = 2.0
"""After which a stranger gives way to another one."""

FINISH_S = 5.0
"""At most, for errors to reach the clients when the service is closed."""


class Server:
    """Memory devices as a service.

    Parameters
    ----------
    pool : it belongs to the service from here on, which closes it.
    address : `unix:PATH`, where payloads go through shared memory, `tcp:HOST:PORT`, or, of IPv6,
        `tcp:[HOST]:PORT`.
    token : what clients have to know; it does not cross the wire.
    shard_bytes : least of shards, unless clients choose: a multiple of 2048. It decides the order
        of additions.
    queue_shards : that a client may have pushed and not got back.
    beat_s : seconds between signs of life of both sides.
    silence_s : seconds without one after which the other side is gone.
    scheduler : `queues`, or `fcfs`, which can end in a deadlock of proxies: see `Engine`.
    snapshots : the folder where clients may save and load; None: nowhere.
    share_memory : clients of TCP that are on this machine go on through shared memory.

    Raises
    ------
    ArgumentError : a number is out of its range, the token is empty, or the address is none.

    Ref: COARSE paper, section III-D.
    """

    def __init__(
        self,
        pool: CoarsePool,
        address: str,
        token: str,
        *,
        shard_bytes: int = SHARD_BYTES,
        queue_shards: int = QUEUE_SHARDS,
        beat_s: float = BEAT_S,
        silence_s: float = SILENCE_S,
        scheduler: Scheduling = "queues",
        snapshots: Path | None = None,
        share_memory: bool = True,
    ) -> None:
        if not is_whole(shard_bytes) or shard_bytes <= 0 or shard_bytes % SHARD_ALIGNMENT:
            raise ArgumentError(
                f"shard_bytes must be a positive multiple of {SHARD_ALIGNMENT}, not {shard_bytes!r}"
            )
        if not is_whole(queue_shards) or queue_shards < 1:
            raise ArgumentError(f"queue_shards must be at least 1, not {queue_shards!r}")
        if not 0 < beat_s < silence_s:
            raise ArgumentError(
                f"beat_s and silence_s must be positive and beat_s the smaller, not {beat_s!r} "
                f"and {silence_s!r}"
            )
        if not token:
            raise ArgumentError("token must not be empty")
        if scheduler not in get_args(Scheduling):
            raise ArgumentError(
                f"scheduler must be one of {', '.join(get_args(Scheduling))}, not {scheduler!r}"
            )
        self.address = Address(address)
        self.token = token
        self.silence_s = silence_s
        self.engine = Engine(
            pool,
            shard_bytes=shard_bytes,
            queue_shards=queue_shards,
            beat_s=beat_s,
            silence_s=silence_s,
            scheduler=scheduler,
            snapshots=snapshots,
        )
        self._closed = False
        self._connections: set[Connection] = set()
        self._strangers: dict[Connection, float] = {}
        self._known = threading.Condition()
        self._listeners = [self.address.listen()]
        self._nearby: str | None = None
        if share_memory and not self.address.is_shared:
            self._nearby = f"@nearstep-{secrets.token_hex(16)}"
            self._listeners.append(Address(f"unix:{self._nearby}").listen())
        place = self.address.place
        self._socket: str | None = None
        if isinstance(place, str) and place[0] != "\0":
            self._socket = os.path.abspath(place)

    @property
    def bound(self) -> str:
        """The address that it listens at; of port 0, the one that it got."""
        if self.address.is_shared:
            return self.address.text
        host, port = self._listeners[0].getsockname()[:2]
        return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"

    def start(self) -> None:
        """Begin to serve, in threads of its own."""
        self.engine.start()
        for each in self._listeners:
            name = "coarse listener"
            threading.Thread(target=self._accept, args=(each,), name=name, daemon=True).start()

    def close(self) -> None:
        """End all jobs; their clients get an error. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        for each in self._listeners:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        with self._known:
            self._known.notify_all()
        self.engine.stop()
        deadline = time.monotonic() + FINISH_S
        for connection in list(self._connections):
            connection.finish()
            while not connection.is_finished and time.monotonic() < deadline:
                time.sleep(0.01)
            connection.end()
        self.engine.pool.close()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._socket)

    def _accept(self, listener: socket.socket) -> None:
        while not self._closed:
            self._make_room()
            try:
                sock, _ = listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # out of descriptors: others will end
                continue
            if sock.family != socket.AF_UNIX:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(sock, FromClient, self.silence_s)
            connection.deadline = time.monotonic() + min(self.silence_s, HANDSHAKE_S)
            connection.max_message_bytes = MAX_STRANGER_BYTES
            with self._known:
                self._strangers[connection] = time.monotonic()
            try:
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            except RuntimeError:  # no more threads
                self._acquaint(connection)
                connection.close()

    def _make_room(self) -> None:
        """Wait until there are fewer strangers; who has been one for long gives way."""
        with self._known:
            while len(self._strangers) >= MAX_STRANGERS and not self._closed:
                oldest, since = next(iter(self._strangers.items()))
                left = since + PATIENCE_S - time.monotonic()
                if left <= 0:
                    oldest.end()
                self._known.wait(max(left, 0.01))

    def _acquaint(self, connection: Connection) -> None:
        """It is no stranger any more: it is known, or it has ended."""
        connection.deadline = None
        connection.max_message_bytes = MAX_MESSAGE_BYTES
        with self._known:
            self._strangers.pop(connection, None)
            self._known.notify_all()

    def _serve(self, connection: Connection) -> None:
        """Read what a client sends, until it ends."""
        session = None
        self._connections.add(connection)
        try:
            session = self._greet(connection)
            self.engine.post(session, session.hello)
            while True:
                message = connection.receive(session.landing)
                session.note(message)
                if isinstance(message, Beat):
                    with contextlib.suppress(OSError):  # a client that leaves has said so
                        connection.send_if_free(message)
                else:
                    self.engine.post(session, message)
        except (FrameError, HandshakeError, SegmentError, StalledError) as error:
            kind = "HandshakeError" if session is None else "RefusedError"
            connection.post(Failed(kind, str(error)[:8000], [], []))
            connection.finish()
            reason = f"broke the protocol: {error}"
        except EOFError:
            reason = "closed its connection"
        except OSError as error:
            reason = f"lost its connection: {error}"
        except Exception as error:
            reason = f"sent what the service failed with: {type(error).__name__}: {error}"
        if session is not None:
            self.engine.post(session, Disconnected(reason))
        self._acquaint(connection)
        connection.close()
        self._connections.discard(connection)

    def _greet(self, connection: Connection) -> Session:
        """The first messages of a client.

        Raises
        ------
        HandshakeError : its version or token is wrong, or it says something else.
        """
        hello = _heard(connection)
        if not isinstance(hello, Hello):
            raise HandshakeError(f"expected Hello, found {type(hello).__name__}")
        if hello.version != VERSION:
            raise HandshakeError(f"expected version {VERSION}, found {hello.version}")
        asked = Challenge(nonce())
        connection.post(asked)
        said = _heard(connection)
        if not isinstance(said, Proof):
            raise HandshakeError(f"expected Proof, found {type(said).__name__}")
        if not hmac.compare_digest(said.digest, proof(self.token, "client", hello, asked.nonce)):
            raise HandshakeError("the token is wrong")
        digest = proof(self.token, "service", hello, asked.nonce)
        if self._nearby is not None and not connection.is_shared:
            connection.post(Nearby(self._nearby, digest))
            if not isinstance(answer := _heard(connection), Stay):
                raise HandshakeError(f"expected Stay, found {type(answer).__name__}")
        self._acquaint(connection)
        return Session(connection, hello, digest)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _heard(connection: Connection) -> Message:
    """What a stranger says, but for signs of life."""
    while True:
        message: Message = connection.receive(lambda _: None)
        if not isinstance(message, Beat):
            return message
