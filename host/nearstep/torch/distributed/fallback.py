"""Gloo, which moves bytes, and does reductions that the memory devices' rings cannot."""

from __future__ import annotations

import threading
import time
import warnings
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from nearstep.coarse.service.errors import JobError
from nearstep.torch.distributed.tensors import operation_name, options_of

SLICE = timedelta(seconds=0.2)
POLL_S = 0.02

NATIVE = threading.RLock()
"""Held by a daemon thread in C++ code, and by the main thread from its end on: when C++ code comes
back to Python after the interpreter's end, Python ends the thread, and C++ the process."""


class GlooFallbackWarning(UserWarning):
    """The devices' rings cannot do a reduction; gloo does it."""


def connection_of_its_own(store: Any) -> Store:
    """Return a connection of its own to a store, because a waiting thread blocks all others."""
    made: Store = store.clone()
    return made


class Gloo:
    """Groups of gloo with the processes of a group of the memory devices.

    Parameters
    ----------
    store : store of that group.
    timeout : limit of each collective.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._groups = 0
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._warned: set[str] = set()
        self._waited: list[Any] = []
        self._closed: JobError | None = None
        self._own = [self._make("gloo")]

    @property
    def group(self) -> Any:
        """The group that moves bytes, and sums what has no ring."""
        self._check_open()
        return self._own[0]

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed

    def make(self) -> Any:
        """Make another group; all processes make theirs in the same order."""
        self._groups += 1
        return self._make(f"gloo/{self._groups}")

    def _make(self, name: str) -> Any:
        prefix = PrefixStore(name, connection_of_its_own(self.store))
        made = dist.ProcessGroupGloo(prefix, self.rank, self.size, self.timeout)
        self._made.add(made)
        return made

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of later collectives of all groups."""
        self.timeout = timeout
        for each in list(self._made):
            each._set_default_timeout(timeout)

    def all_reduce(self, what: str, tensor: Tensor, operation: Any) -> None:
        """Do a reduction that the rings cannot; warn once of each kind."""
        reason = f"{what} of {tensor.dtype}, {operation_name(operation)}"
        if reason not in self._warned and self.size > 1:
            self._warned.add(reason)
            warnings.warn(
                f"{reason}: the memory devices have no ring for it, gloo carries it out",
                GlooFallbackWarning,
                stacklevel=2,
            )
        self.wait([self.group.allreduce([tensor], options_of(operation))])

    def wait(self, works: Sequence[Any]) -> None:
        """Wait for collectives of `group`, unless it is closed meanwhile."""
        self._waited = [*self._under_way, *works]
        for work in works:
            while not work.is_completed():
                try:
                    work.wait(SLICE)
                except RuntimeError:  # of the slice, or of the collective: then it has ended
                    self._check_open()
            work.wait()
        self._waited = self._under_way

    @property
    def _under_way(self) -> list[Any]:
        return [each for each in self._waited if not each.is_completed()]

    def close(self, reason: JobError) -> None:
        """Drop the group: processes that wait for this one get an error of gloo's.

        The destructor waits for collectives under way, so another thread drops it after them.
        """
        if self._closed is None:
            self._closed = reason
            if works := self._under_way:
                threading.Thread(target=_drop, args=(self._own, works), daemon=True).start()
            else:
                self._own.clear()


def _drop(groups: list[Any], works: Sequence[Any]) -> None:
    while not all(each.is_completed() for each in works):
        time.sleep(POLL_S)
    with NATIVE:
        groups.clear()
