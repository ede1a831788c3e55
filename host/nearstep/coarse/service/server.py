"""The service: memory devices for clients in other processes."""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import threading
import time
from typing import Self, get_args

from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.routing import SHARD_ALIGNMENT
from nearstep.coarse.service.engine import Engine, Gone, Scheduling
from nearstep.coarse.service.errors import FrameError, HandshakeError, StalledError
from nearstep.coarse.service.messages import VERSION, Beat, Failed, FromClient, Hello
from nearstep.coarse.service.segment import SegmentError
from nearstep.coarse.service.session import Session
from nearstep.coarse.service.wire import Address, Connection
from nearstep.errors import ArgumentError
from nearstep.scalars import is_whole

SHARD_BYTES = 4 << 20
"""DMA reaches its full bandwidth from 2 MiB on (COARSE paper, section V-B and figure 14); golden
devices on two cores are a fifth faster with 4 MiB."""

QUEUE_SHARDS = 4096
BEAT_S = 1.0
SILENCE_S = 60.0
FINISH_S = 5.0
"""At most, for errors to reach the clients when the service is closed."""


class Server:
    """Memory devices as a service.

    Parameters
    ----------
    pool : it belongs to the service from here on, which closes it.
    address : `unix:PATH`, where payloads go through shared memory, or `tcp:HOST:PORT`.
    token : what clients have to know.
    shard_bytes : least of shards, unless clients choose: a multiple of 2048. It decides the order
        of additions.
    queue_shards : that a client may have pushed and not got back.
    beat_s : seconds between signs of life of both sides.
    silence_s : seconds without one after which the other side is gone.
    scheduler : `queues`, or `fcfs`, which can end in a deadlock of proxies: see `Engine`.

    Raises
    ------
    ArgumentError : a number is out of its range, the token is empty, or the address is none.
    OSError : it cannot listen there.

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
        )
        self._closed = False
        self._connections: set[Connection] = set()
        self._listener = self.address.listen()
        if self.address.is_shared:
            os.chmod(str(self.address.place), 0o600)
        self._thread = threading.Thread(target=self._accept, name="coarse listener", daemon=True)

    @property
    def bound(self) -> str:
        """The address that it listens at; of port 0, the one that it got."""
        if self.address.is_shared:
            return self.address.text
        host, port = self._listener.getsockname()[:2]
        return f"tcp:{host}:{port}"

    def start(self) -> None:
        """Begin to serve, in threads of its own."""
        self.engine.start()
        self._thread.start()

    def close(self) -> None:
        """End all jobs; their clients get an error. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.engine.stop()
        deadline = time.monotonic() + FINISH_S
        for each in list(self._connections):
            each.finish()
            while not each.is_finished and time.monotonic() < deadline:
                time.sleep(0.01)
            each.end()
        self.engine.pool.close()
        if self.address.is_shared:
            with contextlib.suppress(OSError):
                os.unlink(str(self.address.place))

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(0.1)  # out of descriptors: others will end
                continue
            if sock.family == socket.AF_INET:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection = Connection(sock, FromClient, self.silence_s)
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: Connection) -> None:
        """Read what a client sends, until it ends."""
        session = None
        self._connections.add(connection)
        try:
            hello = self._greet(connection)
            session = Session(connection, hello)
            self.engine.post(session, hello)
            while True:
                message = connection.receive(session.landing)
                session.note(message)
                if isinstance(message, Beat):
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
            self.engine.post(session, Gone(reason))
        connection.close()
        self._connections.discard(connection)

    def _greet(self, connection: Connection) -> Hello:
        """The first message of a client.

        Raises
        ------
        HandshakeError : its version or token is wrong, or it says something else.
        """
        deadline = time.monotonic() + self.silence_s

        def idle() -> None:
            if time.monotonic() > deadline:
                raise StalledError(self.silence_s)

        hello = connection.receive(lambda message: None, idle)
        if not isinstance(hello, Hello):
            raise HandshakeError(f"expected Hello, found {type(hello).__name__}")
        if hello.version != VERSION:
            raise HandshakeError(f"expected version {VERSION}, found {hello.version}")
        if not hmac.compare_digest(hello.token.encode(), self.token.encode()):
            raise HandshakeError("the token is wrong")
        return hello

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
