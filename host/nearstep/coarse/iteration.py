"""Pushes, sums and pulls of a training iteration on a timeline, as modelled.

One worker, its memory device and the rings stand for all: they all do the same at the same time.
The worker computes or sums, one at a time; a client's link carries pushes one way and pulls the
other; the memory devices sum one shard after the other.

Ref: COARSE paper, sections III-E and III-F, figure 9.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import accumulate

from nearstep.coarse.dual import DualInputs
from nearstep.coarse.routing import partition
from nearstep.errors import ArgumentError
from nearstep.scalars import check_whole, is_whole
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation, Rate
from nearstep.work.timeline import Timeline

WORKER, UP, DOWN, PROXIES = "worker", "link up", "link down", "memory devices"
"""Resources, each of which does one thing at a time."""


@dataclass(frozen=True, kw_only=True)
class Paths:
    """What a tensor goes through between its client and the sum.

    Parameters
    ----------
    client_bytes_per_s : of the link between a worker and its device, each way.
    sync_bytes_per_s : bytes of a tensor that the devices sum in a second.
    shard_bytes : least size of a shard; None: tensors go whole.
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
        """Push, sum and pull a tensor; returns its last pull. Shards follow each other."""
        after = [*after]
        shards = partition(nbytes, self.shard_bytes or max(1, nbytes))
        for number, shard in enumerate(shards):
            title = f"{name}.{number}" if len(shards) > 1 else name
            moving = shard.nbytes / self.client_bytes_per_s
            summing = shard.nbytes / self.sync_bytes_per_s
            push = graph.add(f"push {title}", UP, after=after, seconds=moving)
            sync = graph.add(f"sync {title}", PROXIES, after=[push], seconds=summing)
            pull = graph.add(f"pull {title}", DOWN, after=[sync], seconds=moving)
        return pull


def pipeline(sizes: Sequence[int], paths: Paths) -> Timeline:
    """Tensors of these sizes that are there at the beginning: figure 9."""
    graph = Graph()
    for number, nbytes in enumerate(sizes):
        paths.add(graph, f"{number}", nbytes, ())
    return execute(graph)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A layer, as an iteration sees it.

    Attributes
    ----------
    nbytes : of its gradients.
    """

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
"""Iterations of a timeline: time goes from the second one's begin to the third one's."""


def iterate(
    blocks: Sequence[Block], inputs: DualInputs, m: int, *, client_bytes_per_s: float, shard: int
) -> Iterations:
    """Iterations with dual synchronization.

    Backward makes the gradients of the last layer first. The first `m` bytes of them go to the
    memory devices, cut within a layer if need be, as soon as that layer's backward has ended; the
    workers sum the rest when backward has ended, and do not compute meanwhile. Forward of a layer
    waits for what it needs: so pulls go on beside forward of the layers before.

    Parameters
    ----------
    blocks : layers in the order of forward.
    inputs : their bytes and times must be those of the blocks.
    m : as from `nearstep.coarse.dual.best_split`.
    client_bytes_per_s : of the link between a worker and its device, each way.
    shard : least bytes of a shard.

    Raises
    ------
    ArgumentError : there is no block, their bytes are not n, or `m` is no integer from 0 to n.
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
    before = [0, *accumulate(each.nbytes for each in reversed(blocks))]
    graph = Graph()
    ready: list[list[Operation]] = [[] for _ in blocks]  # what forward of each layer waits for
    first: list[Operation] = []
    last: list[Operation] = []  # what the worker does next comes after it
    for _ in range(SHOWN):
        for i, block in enumerate(blocks):
            after = [*last, *ready[i]]
            last = [graph.add(f"forward {i}", WORKER, after=after, seconds=block.forward_s)]
            first += last if i == 0 else []
        ready = [[] for _ in blocks]
        for made, i in enumerate(reversed(range(len(blocks)))):
            last = [graph.add(f"backward {i}", WORKER, after=last, seconds=blocks[i].backward_s)]
            if taken := min(blocks[i].nbytes, max(0, m - before[made])):
                ready[i].append(paths.add(graph, f"{i}", taken, last))
        for i, block in enumerate(blocks):
            start = before[len(blocks) - 1 - i]
            if rest := block.nbytes - min(block.nbytes, max(0, m - start)):
                seconds = float(inputs.worker_s(rest))
                ready[i].append(graph.add(f"reduce {i}", WORKER, after=last, seconds=seconds))
    timeline = execute(graph)
    begins = {entry.operation.index: entry.start for entry in timeline.entries}
    cycles = begins[first[-1].index] - begins[first[-2].index]
    return Iterations(timeline, cycles / float(timeline.hertz or 1))
