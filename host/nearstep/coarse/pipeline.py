"""Push, sync and pull of an array on the devices of a pool, shard by shard.

Each device has a client with a link of its own, which carries pushes one way and pulls the other.
While a shard is pushed, the one before is summed and the one before that is pulled.

Ref: COARSE paper, section III-E and figure 9.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.routing import Shard, partition
from nearstep.coarse.schedule import Lanes, add_shards
from nearstep.coarse.tensor import PoolTensor
from nearstep.errors import ArgumentError
from nearstep.work.clock import Clock
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.timeline import Entry, Timeline

Floats = NDArray[np.float32]

QUEUED = 2
"""Shards in the rings at a time: one is summed, and the next one follows without a gap."""


@dataclass(frozen=True)
class LinkUse:
    """Cycles of the makespan by what one direction of a client's link did.

    Attributes
    ----------
    moving : transfer of the bytes at the rate of the link.
    before : idle until the first transfer: for pulls, the first shard's push and sync.
    between : idle between transfers.
    within : transfers beyond their bytes: latency of the link, and waits for the memory.
    after : idle from the last transfer's end: for pushes, the last shard's sync and pull.
    """

    moving: int
    before: int
    between: int
    within: int
    after: int

    @property
    def cycles(self) -> int:
        return self.moving + self.before + self.between + self.within + self.after

    @property
    def busy(self) -> float:
        """Share of the cycles in which the link moved bytes; 0 without cycles."""
        return self.moving / self.cycles if self.cycles else 0.0


@dataclass(frozen=True)
class Pipelined:
    """Result of `push_sync_pull`.

    Attributes
    ----------
    timeline : lanes `up 0`, `down 0` and so on of each client; `rings 0` and `rings 1`, in turn.
    """

    timeline: Timeline
    shards: Sequence[Shard]

    def uses(self, direction: str, client: int, cycles_per_byte: float) -> LinkUse:
        """Return the use of a direction, `up` or `down`, of a client's link."""
        lane = self.timeline.lanes.get(f"{direction} {client}")
        if lane is None:
            raise ArgumentError(f"no link {direction!r} of a client {client!r}")
        begin = min(entry.start for entry in self.timeline.entries)
        end = begin + self.timeline.makespan
        moving = round(sum(shard.nbytes for shard in self.shards) * cycles_per_byte)
        return LinkUse(
            moving=moving,
            before=lane[0].start - begin,
            between=sum(two.start - one.end for one, two in pairwise(lane)),
            within=sum(entry.duration for entry in lane) - moving,
            after=end - lane[-1].end,
        )

    @property
    def syncs(self) -> list[Entry]:
        """Sums of the shards, in order."""
        found = [e for e in self.timeline.entries if e.operation.name.startswith("sync")]
        return sorted(found, key=lambda entry: entry.operation.index)


def push_sync_pull(
    pool: CoarsePool,
    arrays: Sequence[Floats],
    results: Sequence[Floats],
    *,
    shard_bytes: int | None,
    op: str = "sum",
    wire: str = "fp32",
    hertz: float | None = None,
) -> Pipelined:
    """Reduce the arrays of clients, one for each device.

    All rings sum a shard when every client has pushed the shard; then each client pulls the result.
    A direction of a link carries one shard at a time, in the order of the array. After an error or
    Ctrl-C, results that had not been pulled are undefined, and the memory is freed. A failed sum,
    or Ctrl-C while a sum is submitted to the devices, needs `CoarsePool.reset`, which frees its
    memory.

    Parameters
    ----------
    pool : its memory has space for all shards, twice.
    arrays : of each client, float32, of one size, one-dimensional and contiguous.
    results : as the arrays, or the arrays themselves; get the reduced values.
    shard_bytes : least size of a shard; None: the array is one shard.
    op, wire : as in `CoarsePool.submit`.
    hertz : cycles in a second, for the timeline.
    """
    size = _size(pool, arrays, results)
    pool.check_ring("reduce")
    pool.check_operation(op)
    pool.check_wire(wire)
    nbytes = 4 * size
    shards = partition(nbytes, max(1, nbytes) if shard_bytes is None else shard_bytes)
    tensors: list[PoolTensor] = []
    try:
        for shard in shards:
            tensors.append(PoolTensor(pool.rings, (shard.nbytes // 4,)))

        def parts(arrays: Sequence[Floats], shard: Shard) -> Iterator[tuple[int, Floats]]:
            part = slice(shard.offset // 4, (shard.offset + shard.nbytes) // 4)
            return ((client, array[part]) for client, array in enumerate(arrays))

        def push(number: int, shard: Shard) -> Lanes:
            write = tensors[number].submit_write
            return {f"up {c}": {"action": partial(write, c, a)} for c, a in parts(arrays, shard)}

        def sync(number: int, shard: Shard) -> Lanes:
            # Its commands take time, those of a transfer do not: hence the priority.
            action = partial(pool.submit, tensors[number], op, wire)
            return {f"rings {number % QUEUED}": {"action": action, "priority": 1}}

        def pull(number: int, shard: Shard) -> Lanes:
            read = tensors[number].submit_read
            return {f"down {c}": {"action": partial(read, c, a)} for c, a in parts(results, shard)}

        graph = Graph()
        add_shards(graph, shards, {"push": push, "sync": sync, "pull": pull}, str)
        return Pipelined(execute(graph, Clock([pool.device.backend], hertz)), shards)
    finally:
        if not pool.device.closed:
            for tensor in tensors:
                tensor.abandon()


def _size(pool: CoarsePool, arrays: Sequence[Floats], results: Sequence[Floats]) -> int:
    """Return the number of elements of each array, after checks of all."""
    size = arrays[0].size if len(arrays) else 0
    for what, given in (("arrays", arrays), ("results", results)):
        if len(given) != pool.devices:
            raise ArgumentError(
                f"{what} must be one for each of {pool.devices} devices, not {len(given)}"
            )
        for client, each in enumerate(given):
            if each.dtype != np.float32 or each.shape != (size,) or not each.flags.c_contiguous:
                raise ArgumentError(
                    f"{what} must be contiguous, float32 and of shape ({size},), not {each.dtype} "
                    f"of {each.shape} of client {client}"
                )
            if what == "results" and not each.flags.writeable:
                raise ArgumentError(f"results must be writable, not that of client {client}")
    return size
