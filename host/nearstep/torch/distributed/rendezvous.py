"""Rendezvous of the processes of `init_process_group("coarse")` with the service."""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from nearstep.coarse.service.client import Client
from nearstep.coarse.service.errors import JobError, ServiceLostError
from nearstep.coarse.service.spawn import Spawned, token_of
from nearstep.errors import ArgumentError
from nearstep.torch.distributed.fallback import NATIVE, POLL_S, connection_of_its_own
from nearstep.torch.distributed.process_group import CoarseProcessGroup
from nearstep_spec.coarse.config import WIRE_FORMATS

ADDRESS = "NEARSTEP_COARSE"
TOKEN_FILE = "NEARSTEP_COARSE_TOKEN_FILE"
DEVICE = "NEARSTEP_COARSE_DEVICE"
WIRE = "NEARSTEP_COARSE_WIRE"
EXACT = "NEARSTEP_COARSE_EXACT"

KEY = "nearstep/coarse"

Endpoint = tuple[str, str]
"""Address and token of a service."""


class Found:
    """The service shared by this process's groups; rank 0 offers it to later groups, too.

    Attributes
    ----------
    endpoint : future of the service's address and token.
    spawned : the service, if this process started it.
    users : number of groups that use the service.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.endpoint: Future[Endpoint] | None = None
        self.spawned: Spawned | None = None
        self.users = 0

    def take(self) -> tuple[Future[Endpoint], bool]:
        """Count a group; return the endpoint's future, and whether this group must resolve it."""
        with self.lock:
            self.users += 1
            if self.endpoint is not None:
                return self.endpoint, False
            self.endpoint = Future()
            return self.endpoint, True

    def release(self) -> None:
        """Count a group's end; the last one closes a service started by this process."""
        with self.lock:
            self.users -= 1
            if self.users:
                return
            spawned, self.spawned, self.endpoint = self.spawned, None, None
        if spawned is not None:
            spawned.close()

    def spawn(self, endpoint: Future[Endpoint], device: str) -> Endpoint:
        """Start a service, unless all groups that wait for it have ended meanwhile.

        Raises
        ------
        ServiceLostError : the service did not start, or the groups have ended.
        """
        made = Spawned(device)
        with self.lock:
            if self.endpoint is endpoint:
                self.spawned = made
                return made.address, made.token
        made.close()
        raise ServiceLostError("the process group was closed before its service began")


FOUND = Found()
ACCEPTED = set[str]()
"""Answers to this process's earlier offers."""


def standing() -> Endpoint | None:
    """Return the service named by `NEARSTEP_COARSE` in the environment, or None.

    Raises
    ------
    ArgumentError : an address without `NEARSTEP_COARSE_TOKEN_FILE`.
    PermissionError : others can read the file of the token.
    """
    address = os.environ.get(ADDRESS)
    if not address:
        return None
    path = os.environ.get(TOKEN_FILE)
    if not path:
        raise ArgumentError(f"{TOKEN_FILE} must name the token's file, since {ADDRESS} is set")
    return address, token_of(Path(path))


def agree(store: Store, rank: int, size: int, timeout_s: float) -> str:
    """Agree on a random name chosen by rank 0, and return it.

    The store may hold keys of processes that have ended, as when torchrun restarts them. So rank 0
    offers a name, each other rank answers with a name of its own, and rank 0 accepts each answer
    under a key of that answer: each side trusts only keys that contain its own random name.

    Raises
    ------
    JobError : a rank did not begin in time.
    """
    mine = uuid.uuid4().hex
    offer, deadline = f"{KEY}/offer", time.monotonic() + timeout_s

    def wait(late: int) -> None:
        if time.monotonic() > deadline:
            raise JobError(
                f"waited {timeout_s} s for rank {late} to begin the process group", [late]
            )
        time.sleep(POLL_S)

    def read(key: str) -> str:
        return store.get(key).decode() if store.check([key]) else ""

    if rank == 0:
        store.set(offer, mine)
        for peer in range(1, size):
            while (answer := read(f"{KEY}/{mine}/{peer}")) in ("", *ACCEPTED):
                wait(peer)  # or it has not read the acceptance of an earlier offer
            ACCEPTED.add(answer)
            store.set(f"{KEY}/{answer}", mine)
        return mine
    answered = ""
    while not (accepted := read(f"{KEY}/{mine}")):
        if (offered := read(offer)) != answered:
            store.set(f"{KEY}/{offered}/{rank}", mine)
            answered = offered
        else:
            wait(0)
    return accepted


def default_device(size: int, *, exact: bool = False) -> str:
    """Return the URL of golden memory devices, one for each process: from 2 to 64."""
    devices = f"golden:coarse?devices={min(64, max(2, size))}&groups=2&memory_bytes=1GiB"
    return f"{devices}&exact={','.join(WIRE_FORMATS)}" if exact else devices


def _say(store: Store, found: dict[str, Any]) -> None:
    with NATIVE:
        store.set("endpoint", json.dumps(found))


def _said(store: Store, deadline: float) -> dict[str, Any]:
    """What rank 0 says. A thread must not wait in the store itself, where its process may end."""
    while time.monotonic() < deadline:
        with NATIVE:
            if store.check(["endpoint"]):
                said: dict[str, Any] = json.loads(store.get("endpoint"))
                return said
        time.sleep(POLL_S)
    raise JobError("waited for rank 0 to begin a service", [0])


def _find(
    store: Store,
    endpoint: Future[Endpoint],
    is_first: bool,
    rank: int,
    timeout_s: float,
    default: str,
) -> Endpoint:
    """Return the service that rank 0 offers; a process's first group sets `endpoint`."""
    try:
        if rank == 0:
            device = os.environ.get(DEVICE) or default
            found = FOUND.spawn(endpoint, device) if is_first else endpoint.result()
            _say(store, {"endpoint": found})
        else:
            said = _said(store, time.monotonic() + timeout_s)
            if "error" in said:
                raise ServiceLostError(f"rank 0 has no service: {said['error']}")
            found = said["endpoint"][0], said["endpoint"][1]
    except BaseException as error:
        if rank == 0:
            _say(store, {"error": str(error)})
        if is_first:
            endpoint.set_exception(error)
        raise
    if is_first:
        endpoint.set_result(found)
    return found


def create(
    store: Store, rank: int, size: int, timeout: timedelta, *, exact: bool = False
) -> CoarseProcessGroup:
    """Make a process group for `torch.distributed`.

    The group is connected on return if the environment names the service. A service that rank 0
    starts is connected in the background: the first collective raises an error of the start.

    Parameters
    ----------
    exact : as of `CoarseProcessGroup`; `NEARSTEP_COARSE_EXACT=1` sets it, too.

    Raises
    ------
    ArgumentError : `NEARSTEP_COARSE_EXACT` is neither 0 nor 1.
    """
    if (said := os.environ.get(EXACT) or "0") not in ("0", "1"):
        raise ArgumentError(f"{EXACT} must be 0 or 1, not {said!r}")
    exact |= said == "1"
    known = standing()
    timeout_s = timeout.total_seconds()
    job = agree(store, rank, size, timeout_s)
    own = PrefixStore(f"{KEY}/{job}", connection_of_its_own(store))
    endpoint, is_first = (Future[Endpoint](), False) if known else FOUND.take()

    def connect() -> Client:
        default = default_device(size, exact=exact)
        address, token = known or _find(own, endpoint, is_first, rank, timeout_s, default)
        return Client(address, token, job=job, rank=rank, clients=size, timeout_s=timeout_s)

    release: Callable[[], None] = (lambda: None) if known else FOUND.release
    wire = os.environ.get(WIRE, "fp32")
    try:
        group = CoarseProcessGroup(
            connect, job, rank, size, own, timeout, wire=wire, exact=exact, release=release
        )
    except BaseException:
        release()
        raise
    if known:
        try:
            group.wait_until_connected()
        except BaseException:
            group.abort()
            raise
    return group


def register() -> None:
    """Register `coarse` as a backend of `torch.distributed`, for tensors on the CPU."""
    dist.Backend.register_backend("coarse", create, devices=["cpu"])
