"""A client of the service: pushes tensors, and pulls their sums."""

from __future__ import annotations

import hmac
import math
import threading
import time
from collections.abc import Sequence
from itertools import product
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.errors import ExactSumError
from nearstep.coarse.routing import Profile, RoutingTable, check_shard_bytes, check_sizes
from nearstep.coarse.service import messages
from nearstep.coarse.service.arena import Arena
from nearstep.coarse.service.errors import HandshakeError
from nearstep.coarse.service.exchange import Exchange
from nearstep.coarse.service.handshake import nonce, proof
from nearstep.coarse.service.plan import Layout
from nearstep.coarse.service.replies import Replies
from nearstep.coarse.service.wire import Address
from nearstep.scalars import check_whole
from nearstep_spec.coarse.config import MAX_ADDENDS

TIMEOUT_S = 1800.0
PROFILED_BYTES = tuple(1 << power for power in range(12, 25, 2))
"""4 KiB to 16 MiB."""


class Client:
    """One client of a job; the constructor waits for all clients of the job.

    Parameters
    ----------
    address : address of the service: `unix:PATH`, `tcp:HOST:PORT` or `tcp:[HOST]:PORT`.
    token : shared secret; both ends prove that they know it, and it is never sent.
    job : name shared by all clients of the job.
    rank : number of this client, from 0 to `clients` - 1.
    timeout_s : limit of each wait, in seconds.
    silence_s : seconds without a sign of life after which the service counts as lost.

    Attributes
    ----------
    device : URL of the memory devices.
    shard_bytes : default of the least size of a shard, in bytes.
    queue_shards : maximum number of pushed shards that were not returned.
    routing : chooses the device, by size, for exchanges made from now on; None: the device of this
        client's rank. The choice determines the order of additions.

    Raises
    ------
    HandshakeError : wrong token, version, rank or number of clients.
    ServiceLostError : no service at the address, or it ended.

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
        self.job, self.rank, self.clients = job, rank, clients
        self._exchanges = 0
        self.routing: RoutingTable | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._replies = self._introduce(address, token, timeout_s, silence_s)
        self._arena = Arena(self._replies)
        found = self._replies.welcome
        assert found is not None
        self.device, self.devices = found.device, found.devices
        self.shard_bytes, self.queue_shards = found.shard_bytes, found.queue_shards

    def _introduce(self, address: str, token: str, timeout_s: float, silence_s: float) -> Replies:
        """Connect, and wait for all clients; over TCP, switch to a Unix socket on this machine."""
        replies = Replies(address, timeout_s=timeout_s, silence_s=silence_s)
        others = f"all {self.clients} clients of job {self.job!r}"
        try:
            hello = messages.Hello(messages.VERSION, self.job, self.rank, self.clients, nonce())
            replies.send(hello)
            asked: messages.Challenge = replies.wait(lambda: replies.challenge, "the service")
            digest = proof(token, "service", hello, asked.nonce)
            replies.send(messages.Proof(proof(token, "client", hello, asked.nonce)))
            replies.wait(lambda: replies.welcome or replies.nearby, others)
            nearby = replies.nearby
            if nearby is not None:
                _check_service(nearby, digest)
            if nearby is None or not Address(f"unix:{nearby.name}").is_reached:
                if nearby is not None:
                    replies.send(messages.Stay())
                _check_service(replies.wait(lambda: replies.welcome, others), digest)
                return replies
        except BaseException:
            replies.close(leave=False)
            raise
        replies.close(leave=False)
        return self._introduce(f"unix:{nearby.name}", token, timeout_s, silence_s)

    @property
    def timeout_s(self) -> float:
        """Limit of each wait, in seconds."""
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
        operation: messages.Operation = "sum",
        wire: str = "fp32",
        *,
        shard_bytes: int | None = None,
        update: messages.Update | None = None,
        kind: str = "",
        turn: int = 0,
        addends: int = 0,
        form: messages.FormName = "fp32",
    ) -> Exchange:
        """Open a tensor that all clients sum; all clients open exchanges in the same order.

        This client pushes its array to the device of its rank, or the one chosen by `routing`. A
        `gather` sums nothing, and uses no device: each client pushes `elements` bytes, and gets the
        bytes of all (`Exchange.run`), from memory that all clients share.

        Parameters
        ----------
        wire : format on the links of the devices.
        shard_bytes : least size of a shard, a multiple of 2048; None: the service's.
        update : optimizer step that the devices do with the average; parameters are returned.
        kind : description of the tensor, such as its dtype; equal on all clients.
        turn : as in `Exchange.begin`.
        addends : arrays that each client pushes for an exact sum or average of all of them, which
            is rounded once, to `wire`; equal on all clients. 0: one array, summed in the order of
            the rings.
        form : format of the pushed arrays and of the result, which is rounded to it once, after the
            sum in float32; equal on all clients. It changes no other bit.

        Raises
        ------
        ExactSumError : more than 1024 addends in all; nothing was sent.
        RefusedError : the devices do not have this exact sum, or an update in `form`.
        UnsharedError : a client of a gather does not share memory with the service.
        UnlikeError : the clients open different tensors; names the clients of each.
        DeviceMemoryError : the devices have no memory for the tensor.
        OrderError : another client sums a different tensor in this turn.
        """
        chosen = self.shard_bytes if shard_bytes is None else shard_bytes
        check_shard_bytes(chosen)
        check_whole("elements", elements, 1)
        check_whole("addends", addends, 0)
        if self.clients * addends > MAX_ADDENDS:
            raise ExactSumError("addends", f"at most {MAX_ADDENDS}", self.clients * addends)
        device = self.own_device
        if self.routing is not None:
            device = self.routing.proxy_of(4 * elements)
        with self._lock:
            number = self._exchanges
            self._exchanges += 1
        opened = messages.Open(
            number,
            elements,
            operation,
            wire,
            segment=0,
            device=device,
            shard_bytes=chosen,
            update=update,
            kind=kind,
            turn=turn,
            addends=addends,
            form=form,
        )
        memory = self._arena.take(Layout.opened(opened, self.clients).nbytes)
        opened.segment, opened.offset = memory.segment, memory.offset
        return Exchange(self._replies, self._arena, memory, opened, self.rank, self.clients)

    def get(self, key: str, out: NDArray[np.uint8]) -> None:
        """Copy the value of a name to `out`; waits until the value exists."""
        with self._arena.borrow(out.size) as place:
            what, fields = f"{key!r} from another client", (place.segment, out.size, place.offset)
            self._replies.ask(what, messages.Get, key, *fields, into=place.data)
            out[...] = place.data

    def keep(self, key: str, data: NDArray[np.uint8]) -> None:
        """Store bytes under a name, in the memory of all devices, as a new version of the value.

        Raises
        ------
        ArgumentError : the name has more than 256 characters.
        DeviceMemoryError : no memory for the value; the version before it is kept.
        """
        with self._arena.borrow(data.size) as place:
            place.data[:] = data
            fields = key, place.segment, data.size, place.offset
            self._replies.ask(f"{key!r} to be stored", messages.Put, *fields, payload=place.data)

    def save(self, path: str, keys: Sequence[str]) -> str:
        """Write the current values of these names to the next generation of `path`.

        The devices preserve this version by copying pages that change during the write.

        Returns
        -------
        str : path, on the service's machine, of the complete file, flushed to disk.

        Raises
        ------
        ArgumentError : more than 16,384 names, or 512 KiB of them.
        RefusedError : `kind` tells the reason: no such value, no memory for the copies, a full
            disk, or an optimizer step in progress.

        Ref: COARSE paper, section IV-A.
        """
        return self._replies.ask(f"a snapshot in {path}", messages.Save, list(keys), path).text

    def load(self, path: str) -> dict[str, int]:
        """Store the values of a snapshot again: a file, or the newest generation of `path`.

        Returns
        -------
        dict[str, int] : size in bytes of each value of the snapshot, by name.

        Raises
        ------
        RefusedError : the file is torn (names the last good one) or missing. Nothing was changed.
        """
        return self._replies.ask(f"the snapshot in {path}", messages.Load, path).sizes

    def profile(self, sizes: Sequence[int] = PROFILED_BYTES, *, repeats: int = 3) -> Profile:
        """Measure the time to write bytes to the memory of each device and to read them back.

        Parameters
        ----------
        sizes : two or more sizes in bytes, ascending.
        repeats : repetitions of each measurement; the shortest time counts.

        Returns
        -------
        Profile : for all devices; input of `routing_table` and `shard_bytes`.

        Ref: COARSE paper, section III-E.
        """
        check_whole("repeats", repeats, 1)
        check_sizes(sizes)
        seconds: dict[int, dict[int, float]] = {each: {} for each in range(self.devices)}
        with self._arena.borrow(max(sizes)) as place:
            place.data[:] = 0
            for device, size, _ in product(seconds, sizes, range(repeats)):
                what, data = f"{size} bytes from device {device}", place.data[:size]
                fields = place.segment, size, device, place.offset
                began = time.perf_counter()
                self._replies.ask(what, messages.Probe, *fields, payload=data, into=data)
                passed = time.perf_counter() - began
                seconds[device][size] = min(passed, seconds[device].get(size, math.inf))
        return Profile.of(seconds)

    def check_step(self, exchange: Exchange, step: int, hyper: str) -> None:
        """Ask the service whether a step of an updating exchange can have these hyper-parameters.

        Parameters
        ----------
        step : step number t, from 1.
        hyper : JSON object; missing hyper-parameters keep the values given at `Client.exchange`.
        """
        self._replies.ask(
            "hyper-parameters to be checked", messages.Check, exchange.number, step, hyper
        )

    def barrier(self) -> None:
        """Wait for all clients, or raise `JobError` if one is lost."""
        self._replies.ask("all clients at a barrier", messages.Barrier)

    def close(self, *, leave: bool = True) -> None:
        """Close the connection; with `leave`, tell the service first. Do nothing if closed."""
        if self._closed:
            return
        self._closed = True
        self._replies.close(leave=leave)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(leave=kind is None)


def _check_service(found: messages.Welcome | messages.Nearby, digest: bytes) -> None:
    """Raise `HandshakeError` unless the service has proved that it knows the token."""
    if not hmac.compare_digest(found.digest, digest):
        raise HandshakeError("the service does not know the token")
