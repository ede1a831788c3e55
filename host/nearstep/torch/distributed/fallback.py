"""Gloo, which moves bytes, and does reductions that the memory devices' rings cannot."""

from __future__ import annotations

import ctypes
import os
import threading
import time
import warnings
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import Store

from nearstep.coarse.service.errors import JobError
from nearstep.torch.distributed.tensors import operation_name, options_of

SLICE = timedelta(seconds=0.2)
POLL_S = 0.02

NATIVE = threading.RLock()
"""Held by a daemon thread in C++ code, and by the main thread from its end on: when C++ code comes
back to Python after the interpreter's end, Python ends the thread, and C++ the process."""

os.register_at_fork(
    before=NATIVE.acquire, after_in_parent=NATIVE.release, after_in_child=NATIVE.release
)


class GlooFallbackWarning(UserWarning):
    """The devices' rings cannot do a reduction; gloo does it."""


def connection_of_its_own(store: Any) -> Store:
    """Return a connection of its own to a store, because a waiting thread blocks all others."""
    made: Store = store.clone()
    return made


class Gloo:
    """A group of gloo with the processes of a group of the memory devices.

    Parameters
    ----------
    store : place of its own in that group's store.
    timeout : limit of each collective.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self._size = size
        self._warned: set[str] = set()
        self._waited: set[Any] = set()
        self._closed: JobError | None = None
        connection = connection_of_its_own(store)
        self._own = [dist.ProcessGroupGloo(connection, rank, size, timeout)]

    @property
    def group(self) -> Any:
        """Gloo's group, unless this one is closed."""
        self._check_open()
        return self._own[0]

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def all_reduce(self, what: str, tensor: Tensor, operation: Any) -> None:
        """Do a reduction that the rings cannot; warn once of each kind."""
        reason = f"{what} of {tensor.dtype}, {operation_name(operation)}"
        if reason not in self._warned and self._size > 1:
            self._warned.add(reason)
            warnings.warn(
                f"{reason}: the memory devices have no ring for it, gloo carries it out",
                GlooFallbackWarning,
                stacklevel=2,
            )
        self.wait([self.group.allreduce([tensor], options_of(operation))])

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for collectives of `group`, unless it is closed meanwhile."""
        self._waited.update(works)
        for work in works:
            while not work.is_completed():
                try:
                    work.wait(SLICE)
                except RuntimeError:  # of the slice, or of the collective: then it has ended
                    self._check_open()
            work.wait()
        self._waited.difference_update(works)

    def close(self, reason: JobError) -> None:
        """Drop the group: processes that wait for this one get an error of gloo's.

        The destructor waits for collectives under way, so another thread drops it after them.
        """
        if self._closed is None:
            self._closed = reason
            if all(each.is_completed() for each in self._waited):
                self._own.clear()
            else:
                threading.Thread(target=_drop, args=(self._own, self._waited), daemon=True).start()

    def disown(self, reason: JobError) -> None:
        """Close the group in a child process, where its destructor would wait for threads that only
        the parent has: the group is never dropped."""
        self._closed = reason
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._own))


def _drop(groups: list[Any], works: set[Any]) -> None:
    while not all(each.is_completed() for each in list(works)):
        time.sleep(POLL_S)
    with NATIVE:
        groups.clear()
