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
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.routing import partition
from nearstep.coarse.service.segment import PAGE_BYTES

IDENTITIES = {"sum": np.float32(-0.0), "average": np.float32(-0.0), "max": np.float32(-np.inf)}
"""What changes nothing, whatever it is combined with."""

WINDOW_BYTES = 16 << 20
"""Of the shards of a tensor that are on their way at the same time; what stays in a cache is
faster."""

LEAST_PLACES = 4
"""One is filled, one is summed, one waits, and one is taken."""


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


@dataclass(frozen=True)
class Layout:
    """How the shards of a tensor lie in the memory of a client: they take turns in its places.

    A shard is pushed when the one before it in its place has come back.

    Attributes
    ----------
    shards : elements [start, stop) of each.
    places : how many there are, for what is pushed and for what comes back each.
    place_bytes : of each; whole pages.
    """

    shards: Sequence[tuple[int, int]]
    places: int
    place_bytes: int

    @classmethod
    def of(cls, elements: int, shard_bytes: int) -> Self:
        """That of a tensor of float32; for the shards see `routing.partition`."""
        cut = partition(4 * elements, shard_bytes)
        longest = max(each.nbytes for each in cut)
        place_bytes = -(-longest // PAGE_BYTES) * PAGE_BYTES
        places = min(len(cut), max(LEAST_PLACES, WINDOW_BYTES // max(1, place_bytes)))
        shards = [(each.offset // 4, (each.offset + each.nbytes) // 4) for each in cut]
        return cls(shards, places, place_bytes)

    @property
    def nbytes(self) -> int:
        """Of the memory of a client."""
        return 2 * self.places * self.place_bytes

    @property
    def place_elements(self) -> int:
        """That a place has room for."""
        return self.place_bytes // 4

    def pushed(self, memory: NDArray[np.uint8], shard: int) -> NDArray[np.float32]:
        """What a client pushes of a shard, in its memory."""
        return self._part(memory, shard, shard % self.places)

    def pulled(self, memory: NDArray[np.uint8], shard: int) -> NDArray[np.float32]:
        """What comes back of a shard."""
        return self._part(memory, shard, self.places + shard % self.places)

    def _part(self, memory: NDArray[np.uint8], shard: int, place: int) -> NDArray[np.float32]:
        start, stop = self.shards[shard]
        first = place * self.place_bytes
        return memory[first : first + 4 * (stop - start)].view(np.float32)
