"""The service: memory devices for clients in other processes."""

from __future__ import annotations

import contextlib
import os
import secrets
import threading
from pathlib import Path
from typing import Self, get_args

from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.routing import check_shard_bytes
from nearstep.coarse.service.dispatcher import Dispatcher, Scheduling
from nearstep.coarse.service.sockets import Sockets
from nearstep.coarse.service.wire import Address
from nearstep.errors import ArgumentError
from nearstep.scalars import is_whole

SHARD_BYTES = 4 << 20
"""Default of the least size of a shard. DMA reaches its full bandwidth at 2 MiB (COARSE paper,
section V-B and figure 14); golden devices on two cores are a fifth faster with 4 MiB."""

QUEUE_SHARDS = 4096
BEAT_S = 1.0
SILENCE_S = 60.0
FINISH_S = 5.0
"""Limit of the time to send errors to the clients when the service is closed."""


class Server:
    """Memory devices as a service.

    Parameters
    ----------
    pool : owned, and closed, by the service from here on.
    address : `unix:PATH`, with payloads in shared memory, `tcp:HOST:PORT` or, for IPv6,
        `tcp:[HOST]:PORT`.
    token : shared secret of service and clients; it is never sent.
    shard_bytes : least size of a shard, unless the client chooses; a multiple of 2048. The size
        determines the order of additions.
    queue_shards : maximum number of pushed shards of a client that were not returned.
    beat_s : seconds between signs of life of both sides.
    silence_s : seconds without a sign of life after which a client counts as lost.
    scheduler : `queues`, or `fcfs`, which can end in a deadlock of proxies: see `Dispatcher`.
    snapshots : folder in which clients may save and load; None: they may not.
    share_memory : whether TCP clients on this machine switch to shared memory.

    Raises
    ------
    ArgumentError : a number is out of its range, the token is empty, or `address` or `scheduler` is
        invalid.

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
        check_shard_bytes(shard_bytes)
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
        self.dispatcher = Dispatcher(
            pool,
            shard_bytes=shard_bytes,
            queue_shards=queue_shards,
            beat_s=beat_s,
            silence_s=silence_s,
            scheduler=scheduler,
            snapshots=snapshots,
        )
        listeners, nearby = [self.address.listen()], None
        if share_memory and not self.address.is_shared:
            nearby = f"@nearstep-{secrets.token_hex(16)}"
            listeners.append(Address(f"unix:{nearby}").listen())
        self._name = listeners[0].getsockname()
        self._sockets = Sockets(listeners, token, nearby, silence_s, self.dispatcher.post)
        self._stopped = threading.Event()
        place = self.address.place
        self._socket: str | None = None
        if isinstance(place, str) and place[0] != "\0":
            self._socket = os.path.abspath(place)

    @property
    def bound(self) -> str:
        """The address that the service listens at, with the actual port if 0 was given."""
        if self.address.is_shared:
            return self.address.text
        host, port = self._name[:2]
        return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"

    def start(self) -> None:
        """Start to serve, in background threads."""
        self.dispatcher.start(self._sockets.turn, self._sockets.wake)
        threading.Thread(
            target=self._sockets.live,
            args=(self._stopped, self.dispatcher.beat_s),
            name="coarse signs of life",
            daemon=True,
        ).start()

    def close(self) -> None:
        """End all jobs, with an error for their clients. A second call does nothing."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        self.dispatcher.stop()
        self._sockets.close(FINISH_S)
        self.dispatcher.pool.close()
        if self._socket is not None:
            with contextlib.suppress(OSError):
                os.unlink(self._socket)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
