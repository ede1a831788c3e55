"""Processes that end with a group: programs by name, each in a child whose exit status is said."""

from __future__ import annotations

import atexit
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore

from nearstep.coarse.service.errors import JobError
from nearstep.torch.distributed.dual import DualAverage, average
from nearstep.torch.distributed.process_group import CoarseProcessGroup

TIMEOUT_S = 120.0
TIMEOUT = timedelta(seconds=TIMEOUT_S)
KEPT: list[Any] = []


class Other:
    """The other process of a group: groups of gloo, in a thread of this process.

    It takes part when the interpreter has begun to end: no thread may come back from C++ code to
    Python any more.
    """

    def __init__(self, folder: str, groups: int, act: Callable[[list[Any]], None]) -> None:
        self.groups: list[Any] = []
        self.act = act
        threading.Thread(target=self._connect, args=(folder, groups)).start()

    def _connect(self, folder: str, groups: int) -> None:
        for number in range(groups):
            store = PrefixStore(f"gloo/{number}", FileStore(f"{folder}/store", 2))
            self.groups.append(dist.ProcessGroupGloo(store, 1, 2, TIMEOUT))

    def __del__(self, sleep: Callable[[float], None] = time.sleep) -> None:
        self.act(self.groups)
        sleep(0.5)


class Bucket:
    def index(self) -> int:
        return 0

    def buffer(self) -> torch.Tensor:
        return torch.ones(64)


def make(folder: str, size: int) -> CoarseProcessGroup:
    """A group whose collectives need gloo alone."""
    client: Any = SimpleNamespace(clients=size, close=lambda leave: None)
    store = FileStore(f"{folder}/store", size)
    KEPT.append(CoarseProcessGroup(lambda: client, "j", 0, size, store, TIMEOUT))
    found: CoarseProcessGroup = KEPT[-1]
    return found


def works(group: CoarseProcessGroup) -> None:
    """Do a collective, or end the process with status 3."""
    try:
        group.allreduce([torch.ones(3, dtype=torch.int64)]).wait()
    except BaseException as error:
        print(type(error).__name__, error, file=sys.stderr, flush=True)
        os._exit(3)


def strided_receive(folder: str) -> None:
    sent = torch.ones(4)
    KEPT.append(Other(folder, 1, lambda groups: groups[0].send([sent], 0, 0).wait()))
    KEPT.append(make(folder, 2).recv([torch.zeros(4, 4)[:, 0]], 1, 0))


def dual_average(folder: str) -> None:
    summed = torch.ones(64)
    KEPT.append(Other(folder, 2, lambda groups: groups[1].allreduce([summed]).wait()))
    state: Any = DualAverage(make(folder, 2), 0)
    bucket: Any = Bucket()
    KEPT.append((state, average(state, bucket)))


def callback(folder: str) -> None:
    """Of a future, which waits for another work; the main thread raises."""
    summed = torch.ones(3, dtype=torch.int64)
    KEPT.append(Other(folder, 1, lambda groups: groups[0].allreduce([summed]).wait()))
    group = make(folder, 2)
    pending = [group.allreduce([torch.ones(3, dtype=torch.int64)]) for _ in range(2)]
    KEPT.append(pending[0].get_future().then(lambda _: pending[1].wait()))
    raise ValueError("on purpose")


def thread_goes_on(folder: str) -> None:
    """The main thread has ended: Python waits for this thread, and it needs the group."""
    group = make(folder, 1)

    def train() -> None:
        threading.main_thread().join()
        for _ in range(10):
            works(group)
            time.sleep(0.02)

    threading.Thread(target=train).start()


def at_exit(folder: str) -> None:
    atexit.register(works, make(folder, 1))


def child_of_multiprocessing(folder: str) -> None:
    """Such as a DataLoader's: it ends without a trace, and its parent's group goes on."""
    group = make(folder, 1)
    works(group)
    child = multiprocessing.get_context("fork").Process(target=refused, args=(group,))
    child.start()
    child.join(TIMEOUT_S)
    assert child.exitcode == 0, child.exitcode
    works(group)


def child_of_fork(folder: str) -> None:
    """The interpreter of a child ends as well, with its parent's groups in it."""
    group = make(folder, 1)
    works(group)
    if not (child := os.fork()):
        refused(group)
        sys.exit()
    assert status_of(child) == 0
    works(group)


def refused(group: CoarseProcessGroup) -> None:
    for use in (lambda: group.allreduce([torch.ones(3)]), lambda: group.gloo.group):
        with pytest.raises(JobError, match="child"):
            use()
    group.shutdown()
    group.abort()


def status_of(child: int) -> int | None:
    """The exit status of a child, as a shell says it; None if it does not end in time."""
    for _ in range(int(TIMEOUT_S / 0.02)):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            code = os.waitstatus_to_exitcode(status)
            return code if code >= 0 else 128 - code
        time.sleep(0.02)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return None


PROGRAMS = [
    strided_receive,
    dual_average,
    callback,
    thread_goes_on,
    at_exit,
    child_of_multiprocessing,
    child_of_fork,
]

if __name__ == "__main__":
    gc.freeze()  # so that a child does not copy what its last collection looks at
    out, said = Path(sys.argv[1]), {}
    for program in PROGRAMS:
        folder = out.with_name(program.__name__)
        folder.mkdir()
        child = os.fork()
        if not child:
            break
        said[program.__name__] = status_of(child)
    if child:
        out.write_text(json.dumps(said))
    else:
        program(str(folder))
        time.sleep(0.1)
        sys.modules["last of all"] = KEPT  # type: ignore[assignment]
