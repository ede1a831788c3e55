"""Which jobs of the rings sum a tensor of any number of clients on any number of devices.

Each client pushes to one device. A round takes one client of each device, in the order of their
ranks; a ring sums one array of each device, and where a round has no client, the array is the
identity of the operation (-0 of a sum, -inf of a maximum), which changes no bit. What the rounds
gave is summed once more, in the same way. So the order of all additions follows from the number of
devices and the clients' places alone. One device has no ring: its update kernel adds what the
clients pushed, in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

import numpy as np

from nearstep.coarse.routing import partition

IDENTITIES = {"sum": np.float32(-0.0), "average": np.float32(-0.0), "max": np.float32(-np.inf)}
"""What changes nothing, whatever it is combined with."""


@dataclass(frozen=True)
class Job:
    """One array of each device, summed in a ring.

    Attributes
    ----------
    inputs : for each device, what it adds: the number of a value, or None for the identity.
    output : number of the value that it gives, on all devices.
    """

    inputs: tuple[int | None, ...]
    output: int


def plan(places: Sequence[int], devices: int) -> tuple[tuple[Job, ...], ...]:
    """Stages of jobs; those of a stage need nothing of each other. The last one has one job.

    There is no stage with one device.

    Parameters
    ----------
    places : device of each client, by rank. Value r is what client r pushed, and lies there; all
        others, counted from the number of clients on, lie on all devices.
    devices

    Raises
    ------
    ValueError : there is no client or no device, or a place is none of them.
    """
    if not places or devices < 1 or not all(0 <= place < devices for place in places):
        raise ValueError(f"clients need places on at least 1 device, not {places} on {devices}")
    if devices == 1:
        return ()
    waiting: list[list[int]] = [[] for _ in range(devices)]
    for rank, place in enumerate(places):
        waiting[place].append(rank)
    rounds = [*zip_longest(*waiting)]
    stages = []
    following = len(places)
    while True:
        stage = tuple(Job(inputs, following + i) for i, inputs in enumerate(rounds))
        stages.append(stage)
        if len(stage) == 1:
            return tuple(stages)
        following += len(stage)
        values = [job.output for job in stage]
        rounds = [
            tuple(values[first : first + devices]) + (None,) * (devices - len(values) + first)
            for first in range(0, len(values), devices)
        ]


def shards(elements: int, shard_bytes: int) -> list[tuple[int, int]]:
    """Elements [start, stop) of each shard of a tensor of float32; see `routing.partition`."""
    if not elements:
        return []
    cut = partition(4 * elements, shard_bytes)
    return [(each.offset // 4, (each.offset + each.nbytes) // 4) for each in cut]
