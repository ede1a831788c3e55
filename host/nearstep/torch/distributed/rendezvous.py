"""How the processes of `init_process_group("coarse")` find the service of the memory devices."""

from __future__ import annotations

import atexit
import json
import os
import threading
import uuid
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist
from torch._C._distributed_c10d import Store

from nearstep.coarse.service.client import Client
from nearstep.coarse.service.spawn import Spawned, token_of
from nearstep.errors import ArgumentError
from nearstep.torch.distributed.process_group import CoarseProcessGroup

ADDRESS = "NEARSTEP_COARSE"
TOKEN_FILE = "NEARSTEP_COARSE_TOKEN_FILE"
DEVICE = "NEARSTEP_COARSE_DEVICE"
WIRE = "NEARSTEP_COARSE_WIRE"

KEY = "nearstep/coarse"


class Found:
    """The service of this process's groups.

    The first group of a process finds or starts it; others use the same.

    Attributes
    ----------
    place : address and token.
    spawned : if this process started it.
    users : groups that use it.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.place: tuple[str, str] | None = None
        self.spawned: Spawned | None = None
        self.users = 0

    def take(self, store: Store, rank: int, size: int) -> tuple[str, str]:
        """The service's address and token; rank 0 starts one if there is none."""
        with self.lock:
            if self.place is None:
                self.place = self._discover(store, rank, size)
            self.users += 1
            return self.place

    def release(self) -> None:
        """A group is gone; with the last one, the service that was started."""
        with self.lock:
            self.users -= 1
            if self.users:
                return
            spawned, self.spawned, self.place = self.spawned, None, None
        if spawned is not None:
            spawned.close()

    def _discover(self, store: Store, rank: int, size: int) -> tuple[str, str]:
        address = os.environ.get(ADDRESS)
        if address:
            path = os.environ.get(TOKEN_FILE)
            if not path:
                raise ArgumentError(
                    f"{TOKEN_FILE} must name the token's file, since {ADDRESS} is set"
                )
            return address, token_of(Path(path))
        if rank == 0:
            device = os.environ.get(DEVICE) or default_device(size)
            try:
                self.spawned = Spawned(device)
            except BaseException as error:
                store.set(KEY, json.dumps({"error": str(error)}))
                raise
            said = {"address": self.spawned.address, "token": self.spawned.token}
            store.set(KEY, json.dumps(said))
        found = json.loads(store.get(KEY))
        if "error" in found:
            raise ArgumentError(f"rank 0 could not start the service: {found['error']}")
        return found["address"], found["token"]


FOUND = Found()


def default_device(size: int) -> str:
    """A memory device for each process, golden."""
    return f"golden:coarse?devices={min(64, max(2, size))}&groups=2&memory_bytes=1GiB"


def create(store: Store, rank: int, size: int, timeout: timedelta) -> CoarseProcessGroup:
    """A process group, for `torch.distributed`.

    Raises
    ------
    ServiceLostError : there is no service, or it did not begin.
    HandshakeError : it does not take this process.
    JobError : not all processes came in time.
    ArgumentError : an address without the file of its token.
    """
    address, token = FOUND.take(store, rank, size)
    try:
        if rank == 0:
            store.set(f"{KEY}/job", uuid.uuid4().hex)
        job = store.get(f"{KEY}/job").decode()
        client = Client(
            address,
            token,
            job=job,
            rank=rank,
            clients=size,
            timeout_s=timeout.total_seconds(),
        )
    except BaseException:
        FOUND.release()
        raise
    wire = os.environ.get(WIRE, "fp32")
    group = CoarseProcessGroup(client, store, timeout, wire=wire, release=FOUND.release)
    atexit.register(group.shutdown)
    return group


def register() -> None:
    """Make `coarse` a backend of `torch.distributed`, for tensors of the CPU."""
    dist.Backend.register_backend("coarse", create, devices=["cpu"])
