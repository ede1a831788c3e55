"""The order of pushes, syncs and pulls of shards, on devices and modelled."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from nearstep.coarse.routing import Shard
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation

Lanes = Mapping[str, Mapping[str, Any]]
"""By lane, further arguments of `Graph.add`: one operation each."""


def add_shards(
    graph: Graph,
    shards: Sequence[Shard],
    stages: Mapping[str, Callable[[int, Shard], Lanes]],
    title: Callable[[int], str],
    after: Iterable[Operation] = (),
) -> list[Operation]:
    """Add the stages of shards to a graph, and return the last operations of the last shard.

    A stage of a shard waits for all operations of the stage before. A lane does one thing at a
    time, so that shards follow each other in order.

    Parameters
    ----------
    stages : by name, in order: returns the operations of a shard, by its number.
    title : returns the title of a shard, by its number.
    after : what the first stage waits for.
    """
    before, last = [*after], []
    for number, shard in enumerate(shards):
        last = before
        for name, lanes in stages.items():
            last = [
                graph.add(f"{name} {title(number)}", lane, after=last, **how)
                for lane, how in lanes(number, shard).items()
            ]
    return last


def taken_by_devices(before: int, nbytes: int, m: int) -> int:
    """Return how many bytes of a layer or bucket the memory devices sum in dual synchronization.

    Parameters
    ----------
    before : bytes of gradients that backward has made before.
    nbytes : of this layer or bucket.
    m : bytes that the devices sum of all gradients.
    """
    return min(nbytes, max(0, m - before))
