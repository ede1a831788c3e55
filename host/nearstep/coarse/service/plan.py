"""Plan of the ring jobs that sum a tensor of any number of clients on any number of devices.

Each client pushes to one device. A round takes one client of each device, in the order of ranks; a
ring sums one array of each device, and a device without a client in the round adds the identity of
the operation (-0 of a sum, -inf of a maximum), which changes no bit. The rounds' results are summed
in the same way. So the order of all additions depends only on the number of devices and the
clients' devices. A single device has no ring: its update kernel adds the clients' arrays in the
order of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from nearstep.coarse.routing import partition
from nearstep.coarse.service.forms import DTYPES
from nearstep.coarse.service.messages import Open
from nearstep.coarse.service.shared_memory import PAGE_BYTES

IDENTITIES = {"sum": np.float32(-0.0), "average": np.float32(-0.0), "max": np.float32(-np.inf)}
"""Identity of each operation."""

WINDOW_BYTES = 16 << 20
"""Size of the window of a tensor's shards in flight, unless `LEAST_PLACES` needs more; a small
window stays in the processor's caches."""

LEAST_PLACES = 4
"""Places in which one shard is filled, one summed, one waits, and one is read."""


GATHER_PLACES = 2
"""Places of a gather: one is filled while the other is read."""


@dataclass(frozen=True)
class Job:
    """One array of each device, summed by a ring.

    Attributes
    ----------
    inputs : for each device, the number of the value that it adds, or None for the identity.
    output : number of the result, a value on all devices.
    """

    inputs: tuple[int | None, ...]
    output: int


def plan(
    places: Sequence[int], devices: int, *, exact: bool = False
) -> tuple[tuple[Job, ...], ...]:
    """Return stages of independent jobs; the last stage has one job.

    A single device has no stage. An exact sum has one job, which adds all arrays.

    Parameters
    ----------
    places : device of each client, by rank. Value r is the array of client r, on its device only;
        the jobs' results, numbered from the number of clients on, are on all devices.
    """
    if exact:
        return ((Job((), len(places)),),)
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
    """Layout of a tensor's shards in the memory of a client: they share places in turn.

    A shard may be pushed when the earlier shard in its place was returned.

    Of a gather all clients share memory of twice as many slots, used in turn by the shards of all
    versions; a slot has a place of each client. When the shard `places` ahead of a slot's earlier
    one was returned, all clients have pushed that, and so have read the slot.

    Attributes
    ----------
    shards : elements [start, stop) of each.
    places : number of places for pushed shards, and of places for results.
    place_bytes : size of a place for one array, in whole pages.
    addends : arrays of a pushed shard, each in a place of its own, one after another.
    dtype : of the elements in memory.
    gathers : clients of a gather; 0: clients sum.
    """

    shards: Sequence[tuple[int, int]]
    places: int
    place_bytes: int
    addends: int = 1
    dtype: np.dtype[Any] = DTYPES["fp32"]
    gathers: int = 0

    @classmethod
    def opened(cls, opened: Open, clients: int) -> Self:
        """Return the layout of an exchange."""
        if opened.operation != "gather":
            return cls.of(opened.elements, opened.shard_bytes, opened.addends, opened.form)
        cut = partition(opened.elements, opened.shard_bytes)
        pages = -(-max(each.nbytes for each in cut) // PAGE_BYTES)
        shards = [(each.offset, each.offset + each.nbytes) for each in cut]
        places = min(len(cut), GATHER_PLACES)
        return cls(shards, places, pages * PAGE_BYTES, 1, np.dtype(np.uint8), clients)

    @classmethod
    def of(cls, elements: int, shard_bytes: int, addends: int = 0, form: str = "fp32") -> Self:
        """Return the layout of a tensor, cut by `routing.partition`; 0 addends are one array, too.

        Without addends it is cut as one of float32, whatever its format, which fixes the order of
        its sums. Exact sums have none.
        """
        dtype = DTYPES[form]
        unit = dtype.itemsize if addends else DTYPES["fp32"].itemsize
        cut = partition(unit * elements, shard_bytes)
        longest = max(each.nbytes for each in cut) // unit * dtype.itemsize
        place_bytes = -(-longest // PAGE_BYTES) * PAGE_BYTES
        places = min(len(cut), max(LEAST_PLACES, WINDOW_BYTES // max(1, place_bytes)))
        shards = [(each.offset // unit, (each.offset + each.nbytes) // unit) for each in cut]
        return cls(shards, places, place_bytes, max(1, addends), dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of a client's own memory for all places."""
        if self.gathers:
            return 0
        return (self.addends + 1) * self.places * self.place_bytes

    @property
    def common_bytes(self) -> int:
        """Bytes of the memory that all clients of a gather share."""
        return 2 * self.places * self.gathers * self.place_bytes

    def slot(self, common: NDArray[np.uint8], version: int, shard: int) -> NDArray[np.uint8]:
        """Return the bytes of a shard of all clients of a gather, of shape (clients, bytes)."""
        start, stop = self.shards[shard]
        slots = common.reshape(2 * self.places, self.gathers, self.place_bytes)
        number = (version - 1) * len(self.shards) + shard
        return slots[number % len(slots), :, : stop - start]

    @property
    def place_elements(self) -> int:
        """Capacity of a place, in elements."""
        return self.place_bytes // self.dtype.itemsize

    def room(self, memory: NDArray[np.uint8], place: int, *, result: bool) -> NDArray[Any]:
        """Return a place for pushed arrays, one after another, or for a result."""
        first = self.addends * self.places + place if result else self.addends * place
        count = 1 if result else self.addends
        start = first * self.place_bytes
        return memory[start : start + count * self.place_bytes].view(self.dtype)

    def pushed(self, memory: NDArray[np.uint8], shard: int) -> NDArray[Any]:
        """Return a shard's pushed array in a client's memory; of several addends, of shape
        (addends, elements)."""
        start, stop = self.shards[shard]
        room = self.room(memory, shard % self.places, result=False)
        arrays = room.reshape(self.addends, -1)[:, : stop - start]
        return arrays if self.addends > 1 else arrays[0]

    def payload(self, memory: NDArray[np.uint8], shard: int) -> NDArray[np.uint8]:
        """Return the bytes of a client's memory from the first to the last of a pushed shard."""
        start, stop = self.shards[shard]
        room = self.room(memory, shard % self.places, result=False).view(np.uint8)
        own = self.dtype.itemsize * (stop - start)
        return room[: (self.addends - 1) * self.place_bytes + own]

    def pulled(self, memory: NDArray[np.uint8], shard: int) -> NDArray[Any]:
        """Return a shard's result in a client's memory."""
        start, stop = self.shards[shard]
        return self.room(memory, shard % self.places, result=True)[: stop - start]
