"""Gloo, for what the memory devices have no ring for."""

from __future__ import annotations

import warnings
import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store

from nearstep.torch.distributed.tensors import operation_name


class GlooFallbackWarning(UserWarning):
    """A collective has no ring on the devices: gloo carries it out."""


def connection_of_its_own(store: Any) -> Store:
    """The same store for another thread: a thread that waits in a store keeps all others out."""
    made: Store = store.clone()
    return made


class Gloo:
    """Groups of gloo with the processes of a group of the memory devices.

    Parameters
    ----------
    store : of that group.
    timeout : of each collective.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout: timedelta) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout = timeout
        self._groups = 0
        self._fallback: Any = None
        self._made: weakref.WeakSet[Any] = weakref.WeakSet()
        self._warned: set[str] = set()

    def make(self) -> Any:
        """One more group; all processes make theirs in the same order."""
        self._groups += 1
        return self._make(f"gloo/{self._groups}")

    def _make(self, name: str) -> Any:
        prefix = PrefixStore(name, connection_of_its_own(self.store))
        made = dist.ProcessGroupGloo(prefix, self.rank, self.size, self.timeout)
        self._made.add(made)
        return made

    def set_timeout(self, timeout: timedelta) -> None:
        """Bound of collectives of all groups from here on."""
        self.timeout = timeout
        for each in list(self._made):
            each._set_default_timeout(timeout)

    def fallback(self, what: str, dtype: torch.dtype, operation: Any) -> Any:
        """The group that carries out what has no ring; warns once of each kind."""
        reason = f"{what} of {dtype}, {operation_name(operation)}"
        if reason not in self._warned and self.size > 1:
            self._warned.add(reason)
            warnings.warn(
                f"{reason}: the memory devices have no ring for it, gloo carries it out",
                GlooFallbackWarning,
                stacklevel=2,
            )
        if self._fallback is None:
            self._fallback = self._make("gloo")
        return self._fallback

    def close(self) -> None:
        """Drop the group for what has no ring."""
        self._fallback = None
