"""Which jobs of the rings sum a tensor of any number of clients on any number of devices.

Client r pushes to device r modulo the devices, in round r // devices. A ring sums one array of each
device; where there is no client, the array is the identity of the operation (-0 of a sum, -inf of
a maximum), which changes no bit. What the rounds gave is summed once more, in the same way. So the
order of all additions follows from the numbers of clients and devices alone. One device has no
ring: its update kernel adds what the clients pushed, in their order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from nearstep.coarse.routing import SHARD_ALIGNMENT, partition

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


def plan(clients: int, devices: int) -> tuple[tuple[Job, ...], ...]:
    """Stages of jobs; those of a stage need nothing of each other. The last one has one job.

    There is no stage with one device.

    Values 0 to clients - 1 are what the clients pushed; value r lies on device r modulo `devices`.
    All others lie on all devices.

    Raises
    ------
    ValueError : fewer than one client, or one device.
    """
    if clients < 1 or devices < 1:
        raise ValueError(f"at least 1 client and 1 device, not {clients} and {devices}")
    if devices == 1:
        return ()
    values = list(range(clients))
    following = clients
    stages = []
    while True:
        stage = []
        for first in range(0, len(values), devices):
            chosen: list[int | None] = [*values[first : first + devices]]
            chosen += [None] * (devices - len(chosen))
            stage.append(Job(tuple(chosen), following))
            following += 1
        stages.append(tuple(stage))
        values = [job.output for job in stage]
        if len(values) == 1:
            return tuple(stages)


def shards(elements: int, shard_bytes: int) -> list[tuple[int, int]]:
    """Elements [start, stop) of each shard of a tensor of float32; see `routing.partition`."""
    if not elements:
        return []
    cut = partition(4 * elements, shard_bytes)
    return [(each.offset // 4, (each.offset + each.nbytes) // 4) for each in cut]


def longest(shard_bytes: int) -> int:
    """Elements of the longest shard that there can be: a tensor that is not cut."""
    return (2 * shard_bytes + SHARD_ALIGNMENT) // 4
