"""A client of the service: pushes tensors, and pulls what they are summed to."""

from __future__ import annotations

import hmac
import json
import math
import threading
import time
from collections.abc import Sequence
from functools import partial
from itertools import product
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.routing import SHARD_ALIGNMENT, Profile, RoutingTable, check_sizes
from nearstep.coarse.service.arena import Arena
from nearstep.coarse.service.errors import HandshakeError, RefusedError
from nearstep.coarse.service.exchange import Exchange
from nearstep.coarse.service.handshake import nonce, proof
from nearstep.coarse.service.messages import (
    VERSION,
    Barrier,
    Challenge,
    Check,
    Close,
    Get,
    Hello,
    Load,
    Nearby,
    Open,
    Operation,
    Probe,
    Proof,
    Put,
    Save,
    Stay,
    Update,
    Welcome,
)
from nearstep.coarse.service.plan import Layout
from nearstep.coarse.service.replies import Replies
from nearstep.coarse.service.wire import Address
from nearstep.errors import ArgumentError
from nearstep.scalars import check_whole, is_whole

TIMEOUT_S = 1800.0
PROFILED_BYTES = tuple(1 << power for power in range(12, 25, 2))
"""4 KiB to 16 MiB."""


class Client:
    """One of the clients of a job.

    It returns when all clients of the job are there.

    Parameters
    ----------
    address : of the service, `unix:PATH`, `tcp:HOST:PORT` or `tcp:[HOST]:PORT`.
    token : what both ends show to know; it does not cross the wire.
    job : name; clients of one name belong together.
    rank : of this client, from 0.
    clients : of the job.
    timeout_s : bound of each wait, seconds.
    silence_s : seconds without a sign of life after which the service is gone.

    Attributes
    ----------
    device : URL of the memory devices.
    devices : their number.
    shard_bytes : of the shards of tensors.
    queue_shards : that may have been pushed and not have come back.
    routing : where exchanges that are made from here on push to, by their size; None: the device
        of this client's rank. It decides the order of additions.

    Raises
    ------
    HandshakeError : wrong token, version, rank or number of clients.
    ServiceLostError : no service there, or it ended.
    JobError : not all clients came in time.

    Ref: COARSE paper, sections III-D and IV-B.
    """

    def __init__(
        self,
        address: str,
        token: str,
        *,
        job: str,
        rank: int,
        clients: int,
        timeout_s: float = TIMEOUT_S,
        silence_s: float = 60.0,
    ) -> None:
        self.job = job
        self.rank = rank
        self.clients = clients
        self._exchanges = 0
        self.routing: RoutingTable | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._replies = self._introduce(address, token, timeout_s, silence_s)
        self._arena = Arena(self._replies)
        found = self._replies.welcome
        assert found is not None
        self.device: str = found.device
        self.devices: int = found.devices
        self.shard_bytes: int = found.shard_bytes
        self.queue_shards: int = found.queue_shards

    def _introduce(self, address: str, token: str, timeout_s: float, silence_s: float) -> Replies:
        """Connect, and wait for all clients; from TCP go on to a Unix socket on this machine."""
        replies = Replies(address, timeout_s=timeout_s, silence_s=silence_s)
        others = f"all {self.clients} clients of job {self.job!r}"
        try:
            hello = Hello(VERSION, self.job, self.rank, self.clients, nonce())
            replies.send(hello)
            asked: Challenge = replies.wait(lambda: replies.challenge, "the service")
            digest = proof(token, "service", hello, asked.nonce)
            replies.send(Proof(proof(token, "client", hello, asked.nonce)))
            replies.wait(lambda: replies.welcome or replies.nearby, others)
            nearby = replies.nearby
            if nearby is not None:
                _check_service(nearby, digest)
            if nearby is None or not Address(f"unix:{nearby.name}").is_reached:
                if nearby is not None:
                    replies.send(Stay())
                _check_service(replies.wait(lambda: replies.welcome, others), digest)
                return replies
        except BaseException:
            replies.close(leave=False)
            raise
        replies.close(leave=False)
        return self._introduce(f"unix:{nearby.name}", token, timeout_s, silence_s)

    @property
    def timeout_s(self) -> float:
        """Bound of each wait, seconds."""
        return self._replies.timeout_s

    @timeout_s.setter
    def timeout_s(self, seconds: float) -> None:
        self._replies.timeout_s = seconds

    @property
    def own_device(self) -> int:
        """The device of this client's rank."""
        return self.rank % self.devices

    def exchange(
        self,
        elements: int,
        operation: Operation = "sum",
        wire: str = "fp32",
        *,
        shard_bytes: int | None = None,
        update: Update | None = None,
        kind: str = "",
        turn: int = 0,
    ) -> Exchange:
        """A tensor that all clients sum; they open it in the same order.

        This client pushes it to the device of its rank, or where `routing` says.

        Parameters
        ----------
        elements : float32.
        operation : `sum`, `average` or `max`.
        wire : format on the links of the devices.
        shard_bytes : least of a shard, a multiple of 2048; the service's by default.
        update : what the devices do with the average, of which the clients get the parameters.
        kind : of what is summed, such as a dtype: all clients say the same.
        turn : as of `Exchange.begin`.

        Raises
        ------
        ArgumentError : `shard_bytes` is none, or there are no elements.
        UnlikeError : the clients do not open the same; says who opens what.
        DeviceMemoryError : the devices have no memory for it.
        OrderError : other clients sum something else in this turn.
        """
        chosen = self.shard_bytes if shard_bytes is None else shard_bytes
        if not is_whole(chosen) or chosen < 1 or chosen % SHARD_ALIGNMENT:
            raise ArgumentError(
                f"shard_bytes must be a positive multiple of {SHARD_ALIGNMENT}, not {chosen!r}"
            )
        check_whole("elements", elements, 1)
        device = self.own_device
        if self.routing is not None:
            device = self.routing.proxy_of(4 * elements)
        with self._lock:
            number = self._exchanges
            self._exchanges += 1
        layout = Layout.of(elements, chosen)
        place = self._arena.take(layout.nbytes)

        def release() -> None:
            del self._replies.sums[number]
            self._replies.send(Close(number))
            self._arena.give(place)

        exchange = Exchange(
            self._replies,
            number,
            elements,
            layout,
            place.data,
            queue_shards=self.queue_shards,
            release=release,
        )
        try:
            self._replies.send(
                Open(
                    number,
                    elements,
                    operation,
                    wire,
                    place.segment,
                    device,
                    chosen,
                    update,
                    kind,
                    turn,
                    place.offset,
                )
            )
            exchange.wait_opened()
        except RefusedError:
            del self._replies.sums[number]
            self._arena.give(place)
            raise
        return exchange

    def get(self, key: str, out: NDArray[np.uint8]) -> None:
        """Copy what is kept under a name to `out`, when it is there.

        Raises
        ------
        UnlikeError : there are more or fewer bytes.
        """
        with self._arena.borrow(out.size) as place:
            self._replies.ask(
                f"{key!r} from another client",
                lambda n: Get(n, key, place.segment, out.size, place.offset),
                into=place.data,
            )
            out[...] = place.data

    def keep(self, key: str, data: NDArray[np.uint8]) -> None:
        """Keep bytes under a name, in the memory of all devices: a new version of the value.

        Raises
        ------
        DeviceMemoryError : the version before it is still there.
        """
        with self._arena.borrow(data.size) as place:
            place.data[:] = data
            self._replies.ask(
                f"{key!r} to be stored",
                lambda n: Put(n, key, place.segment, data.size, place.offset),
                place.data,
            )

    def save(self, path: str, keys: Sequence[str]) -> str:
        """Write what is kept under these names now to the next generation of `path`.

        The devices keep that version in copies of the pages that change meanwhile.

        Returns
        -------
        str : path of the file, on the service's machine; it is whole and on the disk.

        Raises
        ------
        RefusedError : `kind` says why: no such value, no space for the copies, a full disk, a step
            of an optimizer that is under way.

        Ref: COARSE paper, section IV-A.
        """
        return self._replies.ask(f"a snapshot in {path}", lambda n: Save(n, list(keys), path))

    def load(self, path: str) -> dict[str, int]:
        """Keep again what a snapshot has: a file, or the newest generation of `path`.

        Returns
        -------
        dict[str, int] : bytes of each value that is kept now, by name.

        Raises
        ------
        RefusedError : torn, or not there; names the last good one. Nothing was changed.
        """
        text = self._replies.ask(f"the snapshot in {path}", lambda n: Load(n, path))
        found: dict[str, int] = json.loads(text)
        return found

    def profile(self, sizes: Sequence[int] = PROFILED_BYTES, *, repeats: int = 3) -> Profile:
        """Measure how long bytes take to the memory of each device and back.

        Parameters
        ----------
        sizes : bytes; two or more.
        repeats : of each measurement; the shortest counts.

        Returns
        -------
        Profile : of all devices; `routing_table` and `shard_bytes` make something of it.

        Raises
        ------
        ArgumentError : fewer than one repeat.
        ProfileError : sizes that are none.

        Ref: COARSE paper, section III-E.
        """
        check_whole("repeats", repeats, 1)
        check_sizes(sizes)
        seconds: dict[int, dict[int, float]] = {each: {} for each in range(self.devices)}
        with self._arena.borrow(max(sizes)) as place:
            place.data[:] = 0
            for device, size, _ in product(seconds, sizes, range(repeats)):
                probe = partial(
                    Probe,
                    segment=place.segment,
                    nbytes=size,
                    device=device,
                    offset=place.offset,
                )
                data = place.data[:size]
                began = time.perf_counter()
                self._replies.ask(f"{size} bytes from device {device}", probe, data, data)
                passed = time.perf_counter() - began
                seconds[device][size] = min(passed, seconds[device].get(size, math.inf))
        return Profile.of(seconds)

    def check_step(self, exchange: Exchange, step: int, hyper: str) -> None:
        """Ask whether a step of an exchange that updates can have these hyper-parameters.

        Parameters
        ----------
        step : t, from 1.
        hyper : JSON; what is not there is as it was given in the beginning.

        Raises
        ------
        RefusedError : it cannot; nothing was done, and the job goes on.
        """
        self._replies.ask(
            "hyper-parameters to be checked",
            lambda n: Check(n, exchange.number, step, hyper),
        )

    def barrier(self) -> None:
        """Wait for all clients. Raises `JobError` if one is gone."""
        self._replies.ask("all clients at a barrier", Barrier)

    def close(self, *, leave: bool = True) -> None:
        """End, and tell the service so. Closing twice does nothing."""
        if self._closed:
            return
        self._closed = True
        self._replies.close(leave=leave)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(leave=kind is None)


def _check_service(found: Welcome | Nearby, digest: bytes) -> None:
    """Raise `HandshakeError` unless the service has shown that it knows the token."""
    if not hmac.compare_digest(found.digest, digest):
        raise HandshakeError("the service does not know the token")
