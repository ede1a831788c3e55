"""A cache of a process group's exchanges, and their routing to devices."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from nearstep.coarse.errors import ExactSumError
from nearstep.coarse.routing import (
    SHARD_ALIGNMENT,
    RoutingTable,
    check_sizes,
    routing_table,
    shard_bytes,
)
from nearstep.coarse.service.client import PROFILED_BYTES, Client
from nearstep.coarse.service.errors import DeviceMemoryError
from nearstep.coarse.service.exchange import Exchange
from nearstep.coarse.service.messages import FormName, Operation, ReduceOpName
from nearstep.scalars import check_whole

FORMS: Mapping[str, FormName] = {"float16": "fp16", "bfloat16": "bf16"}
"""Formats of dtypes of 16 bits: of tensors in memory, and of their exact sums."""

KEPT_BYTES = 1 << 29
"""Device memory of cached exchanges above which the oldest are evicted, in bytes."""


class Exchanges:
    """The exchanges of one process of a group; all processes call the same methods in one order.

    Parameters
    ----------
    client : returns the client.
    wire : format on the links of the devices.

    Attributes
    ----------
    wire : format on the links of the devices.
    exact : whether sums and averages are exact: rounded once, to the dtype of the tensors if that
        has 16 bits, otherwise to `wire`.
    shard_bytes : least size of a shard, in bytes; None: the service's.
    measure_every : sums after which routing is measured again; 0: never.
    measure_bytes : sizes to measure, in bytes.
    measured : number of measurements.

    Ref: COARSE paper, section III-E.
    """

    def __init__(self, client: Callable[[], Client], wire: str) -> None:
        self._connected = client
        self.wire = wire
        self.exact = False
        self.shard_bytes: int | None = None
        self.measure_every = 0
        self.measure_bytes: Sequence[int] = PROFILED_BYTES
        self.measured = 0
        self._sums = 0
        self._kept: OrderedDict[tuple[int, str, str, int], Exchange] = OrderedDict()

    @property
    def client(self) -> Client:
        return self._connected()

    def take(
        self, elements: int, operation: ReduceOpName, kind: str, turn: int, addends: int = 0
    ) -> Exchange:
        """Return a cached exchange, or a new one.

        Parameters
        ----------
        kind : dtype of the tensor.
        turn : number of this sum, from 1.
        addends : as of `Client.exchange`; 0: one, if `exact` is set and the operation is no
            maximum.

        Raises
        ------
        ExactSumError : the tensor's format of 16 bits is not that of `wire`.
        """
        if self.exact and operation != "max":
            addends = max(1, addends)
        if self.measure_every and self._sums % self.measure_every == 0:
            self.measure()
        self._sums += 1
        return self._take(elements, operation, kind, turn, addends)

    def gather(self, nbytes: int, kind: str, turn: int) -> Exchange:
        """Return an exchange that gathers `nbytes` bytes of each process; otherwise as `take`."""
        return self._take(nbytes, "gather", kind, turn)

    def _take(
        self,
        elements: int,
        operation: Operation,
        kind: str = "",
        turn: int = 0,
        addends: int = 0,
    ) -> Exchange:
        key = elements, operation, kind, addends
        found = self._kept.pop(key, None)
        if found is None:
            while self._kept and self._kept_bytes + _nbytes(*key) > KEPT_BYTES:
                self._kept.popitem(last=False)[1].close()
            try:
                found = self._open(elements, operation, kind, turn, addends)
            except DeviceMemoryError:
                if not self._kept:
                    raise
                self.close()
                found = self._open(elements, operation, kind, turn, addends)
        self._kept[key] = found
        return found

    def _open(
        self, elements: int, operation: Operation, kind: str, turn: int, addends: int
    ) -> Exchange:
        return self.client.exchange(
            elements,
            operation,
            self._format(kind) if addends else self.wire,
            shard_bytes=self.shard_bytes,
            kind=kind,
            turn=turn,
            addends=addends,
            form=FORMS.get(kind, "fp32"),
        )

    def _format(self, kind: str) -> str:
        """Return the format of an exact sum of tensors of this dtype."""
        own = FORMS.get(kind, self.wire)
        if self.wire not in ("fp32", own):
            raise ExactSumError("wire", f"fp32 or {own}, the format of {kind}", repr(self.wire))
        return own

    @property
    def _kept_bytes(self) -> int:
        return sum(_nbytes(*key) for key in self._kept)

    def close(self) -> None:
        """Free the memory of all cached exchanges."""
        while self._kept:
            self._kept.popitem()[1].close()

    def forget(self) -> None:
        """Drop all cached exchanges of a closed client."""
        self._kept.clear()

    def route(self, table: RoutingTable | None, shard_bytes: int | None = None) -> None:
        """Push by a routing table from now on, in shards of at least `shard_bytes`; None: the
        defaults.

        Tables may differ between processes; `shard_bytes` must not.
        """
        self.close()
        self.client.routing = table
        self.shard_bytes = shard_bytes

    def measure(self) -> None:
        """Measure transfers to all devices, one process after the other, and route by the result.

        Each process has its own table; the size of shards is the largest S' of all processes.
        """
        for rank in range(self.client.clients):
            if rank == self.client.rank:
                profile = self.client.profile(self.measure_bytes)
            self.client.barrier()
        units = np.array([-(-shard_bytes(profile) // SHARD_ALIGNMENT)], np.float32)
        longest = np.empty_like(units)
        self._take(1, "max").reduce(units, longest)
        self.route(routing_table(profile), int(longest[0]) * SHARD_ALIGNMENT)
        self.measured += 1

    def keep_measuring(self, every: int, sizes: Sequence[int]) -> None:
        """Measure before the next sum, and again after each `every` sums; 0: never."""
        check_whole("every", every, 0)
        check_sizes(sizes)
        self.measure_bytes = sizes
        self.measure_every = every
        self._sums = 0


def _nbytes(elements: int, operation: str, kind: str, addends: int) -> int:
    """Return the device memory of an exchange for one client, in bytes, as for whole tensors; of a
    gather, its part of the shared memory."""
    if operation == "gather":
        return 2 * elements
    return 4 * elements * (1 + max(1, addends))
