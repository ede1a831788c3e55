"""Push, sync and pull of an array on the devices of a pool, shard by shard.

A client for each device pushes its array over a link of its own and pulls the result over the same
one, the other way. While a shard goes up, those before it are summed, and those before these come
down.

Ref: COARSE paper, section III-E and figure 9.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.pool import CoarsePool
from nearstep.coarse.routing import Shard, partition
from nearstep.coarse.tensor import PoolTensor
from nearstep.errors import ArgumentError
from nearstep.work.clock import Clock
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.timeline import Entry, Timeline

Floats = NDArray[np.float32]

QUEUED = 2
"""Shards that the rings have at a time: one is summed, and the next one follows without a gap."""


@dataclass(frozen=True)
class LinkUse:
    """Where the cycles of one direction of a client's link went, in all that was under way.

    They add up to the makespan.

    Attributes
    ----------
    moving : that the bytes take at the rate of the link.
    before : until the first transfer: for pulls, the first shard's push and sync.
    between : no transfer was under way, and there was one to come.
    within : of transfers, beyond their bytes: latency of the link, and waits for the memory.
    after : from the last transfer's end: for pushes, the last shard's sync and pull.
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
        """Share of the cycles in which the link moved bytes; 0 of no cycles."""
        return self.moving / self.cycles if self.cycles else 0.0


@dataclass(frozen=True)
class Pipelined:
    """What became of `push_sync_pull`.

    Attributes
    ----------
    timeline : lanes `up 0`, `down 0` and so on of each client, and `rings 0`, `rings 1`, in turn,
        for shards that the rings have.
    """

    timeline: Timeline
    shards: Sequence[Shard]

    def uses(self, direction: str, client: int, cycles_per_byte: float) -> LinkUse:
        """Where the cycles of a direction, `up` or `down`, of a client's link went.

        Raises
        ------
        ArgumentError : there is no such client or direction.
        """
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
        """Of each shard, in order."""
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

    A shard is summed by all rings, when every client has pushed it; each client pulls it when it
    has been summed. A direction of a link carries one shard at a time, in the order of the array.
    If anything fails, or Ctrl-C ends it, the results that had not been pulled are undefined, and
    the memory is given back. A failed sum asks for `CoarsePool.reset`, as ever, and so does Ctrl-C
    while a sum is given to the devices (`ResetNeededError`): its memory is given back by that.

    Parameters
    ----------
    pool : all shards have a place in its memory, twice.
    arrays : of each client, float32, of one size, one-dimensional and contiguous.
    results : as the arrays, or the arrays themselves; they have the reduced values at the end.
    shard_bytes : least size of a shard; None: the array goes whole.
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
        graph = _graph(pool, tensors, shards, arrays, results, op, wire)
        return Pipelined(execute(graph, Clock([pool.device.backend], hertz)), shards)
    finally:
        if not pool.device.closed:
            for tensor in tensors:
                tensor.abandon()


def _graph(
    pool: CoarsePool,
    tensors: Sequence[PoolTensor],
    shards: Sequence[Shard],
    arrays: Sequence[Floats],
    results: Sequence[Floats],
    op: str,
    wire: str,
) -> Graph:
    graph = Graph()
    for number, (tensor, shard) in enumerate(zip(tensors, shards, strict=True)):
        part = slice(shard.offset // 4, (shard.offset + shard.nbytes) // 4)
        pushes = [
            graph.add(
                f"push {number}",
                f"up {client}",
                action=partial(tensor.submit_write, client, array[part]),
            )
            for client, array in enumerate(arrays)
        ]
        sync = graph.add(
            f"sync {number}",
            f"rings {number % QUEUED}",
            after=pushes,
            action=partial(pool.submit, tensor, op, wire),
            priority=1,  # its commands take time, those of a transfer do not
        )
        for client, result in enumerate(results):
            graph.add(
                f"pull {number}",
                f"down {client}",
                after=[sync],
                action=partial(tensor.submit_read, client, result[part]),
            )
    return graph


def _size(pool: CoarsePool, arrays: Sequence[Floats], results: Sequence[Floats]) -> int:
    """Elements of each array, when all are as they must be."""
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
