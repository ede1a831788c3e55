"""Gloo, which moves bytes, and does reductions that the memory devices' rings cannot."""

from __future__ import annotations

import contextlib
import threading
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store

from nearstep.coarse.service.errors import JobError
from nearstep.torch.distributed.tensors import operation_name, options_of

SLICE_S = 0.2


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
        self._own: Future[Any] = Future()
        threading.Thread(target=self._connect, name="coarse gloo", daemon=True).start()

    @property
    def group(self) -> Any:
        """The group for bytes, and for reductions without a ring; waits until it is connected."""
        return self._own.result()

    def _connect(self) -> None:
        with contextlib.suppress(InvalidStateError):  # closed meanwhile
            try:
                self._own.set_result(self._make("gloo"))
            except Exception as error:
                self._own.set_exception(error)

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
        """Wait for collectives of `group`; raise if the group is closed meanwhile."""
        for work in works:
            ended = threading.Event()
            work.get_future().add_done_callback(lambda _, ended=ended: ended.set())
            while not ended.wait(SLICE_S):
                self.group  # noqa: B018
            work.wait()

    def close(self, reason: JobError) -> None:
        """Drop the group; processes that wait for this one get an error from gloo."""
        own, self._own = self._own, Future()
        self._own.set_exception(reason)
        if not own.done():
            own.set_exception(reason)
        # The last reference is dropped in another thread: that waits for running collectives.
        threading.Thread(target=own.exception, daemon=True).start()
