"""Pushes, sums and pulls of a training iteration on a timeline, as modelled.

One worker, its memory device and the rings represent all, which work in lockstep. Each resource
does one thing at a time: a worker that computes or sums, a client's link in either direction, and
the memory devices.

Ref: COARSE paper, sections III-E and III-F, figure 9.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from nearstep.coarse.dual import DualInputs
from nearstep.coarse.routing import Shard, partition
from nearstep.coarse.schedule import Lanes, add_shards, taken_by_devices
from nearstep.errors import ArgumentError
from nearstep.scalars import check_whole, is_whole
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation, Rate
from nearstep.work.timeline import Timeline

WORKER, UP, DOWN, PROXIES = "worker", "link up", "link down", "memory devices"
"""Resources."""


@dataclass(frozen=True, kw_only=True)
class Paths:
    """Rates between a client and the sum.

    Parameters
    ----------
    client_bytes_per_s : of the link between a worker and its device, each way.
    sync_bytes_per_s : bytes of a tensor that the devices sum in a second.
    shard_bytes : least size of a shard; None: a tensor is one shard.
    """

    client_bytes_per_s: float
    sync_bytes_per_s: float
    shard_bytes: int | None

    def __post_init__(self) -> None:
        for rate in (self.client_bytes_per_s, self.sync_bytes_per_s):
            Rate(bytes_per_s=rate)  # raises if it is none
        if self.shard_bytes is not None:
            check_whole("shard_bytes", self.shard_bytes, 1)

    def add(self, graph: Graph, name: str, nbytes: int, after: Iterable[Operation]) -> Operation:
        """Add push, sum and pull of a tensor, and return its last pull."""
        shards = partition(nbytes, self.shard_bytes or max(1, nbytes))

        def at(lane: str, bytes_per_s: float) -> Callable[[int, Shard], Lanes]:
            return lambda _, shard: {lane: {"seconds": shard.nbytes / bytes_per_s}}

        stages = {
            "push": at(UP, self.client_bytes_per_s),
            "sync": at(PROXIES, self.sync_bytes_per_s),
            "pull": at(DOWN, self.client_bytes_per_s),
        }
        several = len(shards) > 1
        (pull,) = add_shards(
            graph, shards, stages, lambda i: f"{name}.{i}" if several else name, after
        )
        return pull


def pipeline(sizes: Sequence[int], paths: Paths) -> Timeline:
    """Push, sum and pull tensors of these sizes, all ready at the beginning: figure 9."""
    graph = Graph()
    for number, nbytes in enumerate(sizes):
        paths.add(graph, f"{number}", nbytes, ())
    return execute(graph)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A layer, with the bytes of its gradients."""

    nbytes: int
    forward_s: float
    backward_s: float


@dataclass(frozen=True)
class Iterations:
    """Iterations on the timeline.

    Attributes
    ----------
    seconds : from one iteration's first forward to the next one's.
    """

    timeline: Timeline
    seconds: float


SHOWN = 3
"""Iterations of a timeline: the time is that between the begins of the second and third one."""


def iterate(
    blocks: Sequence[Block], inputs: DualInputs, m: int, *, client_bytes_per_s: float, shard: int
) -> Iterations:
    """Model iterations with dual synchronization.

    Backward makes the gradients of the last layer first. The memory devices sum the first `m` bytes
    of them, from the end of a layer's backward on; a layer can be cut. The workers sum the rest
    after backward, and do not compute meanwhile. Forward of a layer waits for its gradients, so
    pulls run beside forward of the layers before.

    Parameters
    ----------
    blocks : layers in the order of forward.
    inputs : with the bytes and times of the blocks.
    m : as from `nearstep.coarse.dual.best_split`.
    client_bytes_per_s : of the link between a worker and its device, each way.
    shard : least bytes of a shard.
    """
    whole = sum(each.nbytes for each in blocks)
    if not blocks or whole != inputs.nbytes:
        raise ArgumentError(f"blocks must have n = {inputs.nbytes} bytes, not {whole}")
    if not (is_whole(m) and 0 <= m <= whole):
        raise ArgumentError(f"m must be an integer from 0 to {whole}, not {m!r}")
    rate = Fraction(inputs.proxy_bytes_per_s) / (inputs.ring or 1)
    paths = Paths(
        client_bytes_per_s=client_bytes_per_s, sync_bytes_per_s=float(rate), shard_bytes=shard
    )
    ends = [*accumulate(each.nbytes for each in reversed(blocks))][::-1]
    taken = [
        taken_by_devices(end - each.nbytes, each.nbytes, m)
        for each, end in zip(blocks, ends, strict=True)
    ]
    graph = Graph()
    ready: list[list[Operation]] = [[] for _ in blocks]  # what forward of each layer waits for
    first: list[Operation] = []
    last: list[Operation] = []  # of the worker
    for _ in range(SHOWN):
        for i, block in enumerate(blocks):
            after = [*last, *ready[i]]
            last = [graph.add(f"forward {i}", WORKER, after=after, seconds=block.forward_s)]
            first += last if i == 0 else []
        ready = [[] for _ in blocks]
        for i in reversed(range(len(blocks))):
            last = [graph.add(f"backward {i}", WORKER, after=last, seconds=blocks[i].backward_s)]
            if taken[i]:
                ready[i].append(paths.add(graph, f"{i}", taken[i], last))
        for i, block in enumerate(blocks):
            if rest := block.nbytes - taken[i]:
                seconds = float(inputs.worker_s(rest))
                ready[i].append(graph.add(f"reduce {i}", WORKER, after=last, seconds=seconds))
    timeline = execute(graph)
    begins = {entry.operation.index: entry.start for entry in timeline.entries}
    cycles = begins[first[-1].index] - begins[first[-2].index]
    return Iterations(timeline, cycles / float(timeline.hertz or 1))
