"""A process that ends while a work of its group is pending: programs by name.

The other process of the group is one of gloo's in this process, which takes part when the
interpreter has begun to end: threads must not come back from C++ code any more.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from nearstep.torch.distributed.dual import DualAverage, average
from nearstep.torch.distributed.process_group import CoarseProcessGroup

TIMEOUT = timedelta(seconds=60)
KEPT: list[Any] = []


class Other:
    """The other process of a group, with groups of gloo."""

    def __init__(self, folder: str, count: int, act: Any) -> None:
        self.groups: list[Any] = []
        self.act = act
        thread = threading.Thread(target=self._make, args=(folder, count))
        thread.start()
        self.join = thread.join

    def _make(self, folder: str, count: int) -> None:
        for number in range(count):
            store = PrefixStore(f"gloo/{number}", FileStore(f"{folder}/store", 2))
            self.groups.append(dist.ProcessGroupGloo(store, 1, 2, TIMEOUT))

    def __del__(self, say: Any = print, sleep: Any = time.sleep) -> None:
        self.act(self.groups)
        say("the other one takes part", flush=True)
        sleep(0.5)


class Bucket:
    def index(self) -> int:
        return 0

    def buffer(self) -> torch.Tensor:
        return torch.ones(64)


def group(folder: str) -> CoarseProcessGroup:
    """A group that does without a service."""
    client: Any = SimpleNamespace(clients=2, close=lambda leave: None)
    store = FileStore(f"{folder}/store", 2)
    made = CoarseProcessGroup(lambda: client, "j", 0, 2, store, TIMEOUT)
    KEPT.append(made)
    return made


def strided_receive(folder: str) -> None:
    sent = torch.ones(4)
    KEPT.append(Other(folder, 1, lambda groups: groups[0].send([sent], 0, 0).wait()))
    KEPT.append(group(folder).recv([torch.zeros(4, 4)[:, 0]], 1, 0))


def dual_average(folder: str) -> None:
    summed = torch.ones(64)
    KEPT.append(Other(folder, 2, lambda groups: groups[1].allreduce([summed]).wait()))
    state = DualAverage(group(folder), 0)
    KEPT.append((state, average(state, Bucket())))


if __name__ == "__main__":
    globals()[sys.argv[1]](sys.argv[2])
    time.sleep(0.1)
    sys.modules["ends of the interpreter"] = KEPT  # type: ignore[assignment]
