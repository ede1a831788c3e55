"""An exchange in the memory of the devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.buffer import Buffer
from nearstep.coarse.errors import ExactSumError
from nearstep.coarse.pool import OPERATIONS, WIRES, CoarsePool
from nearstep.coarse.rings import Addends, Pending, RingJob
from nearstep.coarse.service.forms import narrow, widened
from nearstep.coarse.service.key_value import hyper_of
from nearstep.coarse.service.messages import Open, Operation
from nearstep.coarse.service.plan import IDENTITIES, Job, Layout, plan
from nearstep.coarse.service.session import Session
from nearstep.coarse.service.shared_memory import SharedMemory
from nearstep.coarse.split import Part
from nearstep.coarse.stored import ADDING_RULE, PARAMETERS, AllOf, StoredParameters
from nearstep.errors import ArgumentError


@dataclass(eq=False)
class Room:
    """Device memory of a place, which shards use in turn.

    Attributes
    ----------
    buffers : for each value of the plan, its buffer on each device, or None.
    arrays : of an exact sum, the arrays of each device, one after another.
    lent_in, lent_out : clients whose pushed arrays, or result, are used as device memory without a
        copy.
    holder : the shard that uses the place now.
    """

    buffers: dict[int, list[Buffer | None]] = field(default_factory=dict)
    arrays: list[Buffer] = field(default_factory=list)
    lent_in: set[int] = field(default_factory=set)
    lent_out: set[int] = field(default_factory=set)
    holder: Shard | None = None


@dataclass(eq=False)
class Shard:
    """A shard of an exchange, on the devices.

    Attributes
    ----------
    number : index of the shard in its exchange.
    start, stop : elements [start, stop) of the tensor.
    pushed : clients that have pushed the next version.
    version : number of completed sums.
    stage : current stage of the plan.
    left : jobs or updates of the stage that have not ended.
    step, hyper : step and hyper-parameters of an update, as the clients sent them.
    """

    exchange: DeviceExchange
    number: int
    start: int
    stop: int
    room: Room
    pushed: set[int] = field(default_factory=set)
    version: int = 0
    stage: int = 0
    left: int = 0
    step: int = 0
    hyper: str = ""


class DeviceExchange:
    """The service's state of an exchange: a tensor of all clients, summed shard by shard.

    Parameters
    ----------
    opened : each client's message, by rank; they differ only in segment, offset and device.
    stored : parameters to update with the average; the clients then get the parameters.

    Attributes
    ----------
    job : name of the clients' job.
    common : memory of a gather, shared by all clients; it uses no device. None: clients sum.
    places : device of each client, by rank.

    Raises
    ------
    ArgumentError : without an update, a single device; with one, an operation other than `average`,
        a format other than fp32, or several clients on a single device without the rule that adds
        their arrays.
    """

    def __init__(
        self,
        pool: CoarsePool,
        opened: Mapping[int, Open],
        sessions: Mapping[int, Session],
        stored: StoredParameters | None = None,
    ) -> None:
        first = opened[0]
        self.addends = first.addends
        on = Counter(each.device for each in opened.values())
        self.count = first.addends * max(on.values())
        is_gather = first.operation == "gather"
        if is_gather:
            if stored is not None or first.addends:
                raise ArgumentError("operation of an update or exact sum must not be gather")
        elif first.addends:
            if stored is not None:
                raise ExactSumError("result", "that of the sum", "an update")
            pool.check_exact(first.operation, first.wire, self.count * pool.devices)
        elif stored is None:
            pool.check_ring("sum tensors of clients")
        elif first.form != "fp32":
            raise ArgumentError(f"format of an update must be fp32, not {first.form}")
        elif first.operation != "average":
            raise ArgumentError(f"operation of an update must be average, not {first.operation}")
        elif pool.devices == 1 and len(sessions) > 1:
            pool.device.check_rule(ADDING_RULE)
        self.stored = stored
        self.job = sessions[0].job
        self.number = first.exchange
        self.operation: Operation = first.operation if stored is None else "sum"
        """The update scales the sum."""
        self.wire = first.wire
        self.pool = pool
        self.opened = dict(opened)
        self.sessions = dict(sessions)
        self.form = first.form
        self.layout = Layout.opened(first, len(sessions))
        self.common = SharedMemory(self.layout.common_bytes) if is_gather else None
        self._memory = {
            rank: each.memory(opened[rank], self.layout.nbytes) for rank, each in sessions.items()
        }
        self.places = [opened[rank].device for rank in range(len(opened))]
        self.stages = plan(self.places, pool.devices, exact=bool(first.addends))
        if is_gather:
            self.stages = ()
        self.shards: list[Shard] = []
        self._rooms: list[Room] = []
        self._identities: dict[int, Buffer] = {}
        try:
            if not first.addends:
                self._make_identities(self.layout.place_elements)
            for number in range(self.layout.places):
                self._rooms.append(Room())
                self._furnish(number, self._rooms[-1])
        except BaseException:
            self.free()
            raise
        self.shards += [
            Shard(self, number, start, stop, self._rooms[number % self.layout.places])
            for number, (start, stop) in enumerate(self.layout.shards)
        ]

    @property
    def result(self) -> int:
        """Number of the plan's value that the clients get."""
        return self.stages[-1][0].output

    @property
    def is_between_versions(self) -> bool:
        """Whether all shards have one version and none is pushed, summed or updated."""
        versions = {shard.version for shard in self.shards}
        return len(versions) == 1 and not any(each.pushed or each.left for each in self.shards)

    def _make_identities(self, elements: int) -> None:
        """Allocate the identity of the operation on devices without an array in some job."""
        jobs = [job for stage in self.stages for job in stage]
        for device in range(self.pool.devices):
            if any(job.inputs[device] is None for job in jobs):
                buffer = self.pool.device.alloc(elements, channel=device)
                self._identities[device] = buffer
                buffer.fill(float(IDENTITIES[self.operation]))

    def _furnish(self, place: int, room: Room) -> None:
        """Allocate a place's buffers, or let the devices use the clients' memory instead."""
        if self.common is not None:  # nothing has to be copied
            room.lent_in, room.lent_out = {*self.sessions}, {*self.sessions}
            return
        device, devices, size = self.pool.device, self.pool.devices, self.layout.place_elements
        if self.addends:
            self._furnish_exact(place, room)
        for rank, at in enumerate(self.places if not self.addends else ()):
            values: list[Buffer | None] = [None] * devices
            room.buffers[rank] = values
            values[at] = buffer = device.alloc(size, channel=at)
            changed = devices == 1 and rank == 0  # the other arrays are added to this one
            given = self.layout.room(self._memory[rank], place, result=False)
            if not changed and self._lend(buffer, given):
                room.lent_in.add(rank)
        for stage in self.stages:
            for job in stage:
                outputs: list[Buffer | None] = [None] * devices
                room.buffers[job.output] = outputs
                for at in range(devices):
                    outputs[at] = device.alloc(size, channel=at)
        first = {at: rank for rank, at in reversed([*enumerate(self.places)])}
        for at, rank in first.items() if self.stored is None else ():
            found = room.buffers[self.result][at]
            data = self.layout.room(self._memory[rank], place, result=True)
            if found is not None and self._lend(found, data, writes=True):
                room.lent_out.add(rank)

    def _furnish_exact(self, place: int, room: Room) -> None:
        """Allocate the arrays of a place: as many on each device; -0, which changes no exact sum,
        is in those of no client."""
        size = self.layout.place_elements
        for device in range(self.pool.devices):
            arrays = self.pool.device.alloc(self.count * size, channel=device)
            room.arrays.append(arrays)
            arrays[self.places.count(device) * self.addends * size :].fill(-0.0)
        for rank, memory in self._memory.items():
            if self._lend(self._rows(room, rank), self.layout.room(memory, place, result=False)):
                room.lent_in.add(rank)

    def _lend(self, buffer: Buffer, data: NDArray[Any], *, writes: bool = False) -> bool:
        form = None if self.form == "fp32" else self.form
        return buffer.lend(data, writes=writes, form=form)

    def _rows(self, room: Room, rank: int) -> Buffer:
        """Return the arrays of a client."""
        place, length = self.places[rank], self.addends * self.layout.place_elements
        before = self.places[:rank].count(place)
        return room.arrays[place][before * length : (before + 1) * length]

    def _buffer(self, shard: Shard, value: int, device: int) -> Buffer:
        found = shard.room.buffers[value][device]
        if found is None:
            raise KeyError(f"value {value} is not on device {device}")
        return found[: shard.stop - shard.start]

    def push(self, rank: int, shard: Shard) -> None:
        """Record a pushed shard, and copy it to the client's device unless the memory is lent."""
        shard.room.holder = shard
        if rank not in shard.room.lent_in:
            data = widened(self.layout.pushed(self._memory[rank], shard.number), self.form)
            if self.addends:
                rows, size = self._rows(shard.room, rank), self.layout.place_elements
                for index, row in enumerate(np.atleast_2d(data)):
                    rows[index * size : index * size + row.size].write(row)
            else:
                self._buffer(shard, rank, self.places[rank]).write(data)
        shard.pushed.add(rank)

    def complete(self, shard: Shard) -> None:
        """Count a shard's new version, and release its place."""
        shard.stage = 0
        shard.version += 1
        shard.room.holder = None

    def pull(self, rank: int, shard: Shard) -> NDArray[np.uint8]:
        """Copy a shard's result to a client's memory unless that is lent, and return its bytes."""
        data = self.layout.pulled(self._memory[rank], shard.number)
        place = self.places[rank]
        if self.stored is not None:
            part = slice(shard.start, shard.stop)
            self.stored.tensors[PARAMETERS].front(place)[part].read(data)
        elif rank not in shard.room.lent_out:
            held = [each for each in shard.room.lent_out if self.places[each] == place]
            if held:  # the device has written the result of another client
                data[...] = self.layout.pulled(self._memory[held[0]], shard.number)
            elif self.form == "fp32":
                self._buffer(shard, self.result, place).read(data)
            else:
                narrow(self._buffer(shard, self.result, place).read(), self.form, data)
        return data.view(np.uint8)

    def group(self, shard: Shard) -> int:
        """Return the ring of a shard: adjacent shards use opposite directions."""
        return shard.number % self.pool.groups

    def submit(self, shard: Shard, job: Job) -> Pending:
        """Submit a job of a shard's current stage to all devices."""
        rings = self.pool.rings
        rings.check_ready()
        rings.check_space([self.group(shard)])
        pending = Pending(rings, [self._job(shard, job)])
        rings.submit(pending)
        return pending

    def update(self, shard: Shard) -> AllOf:
        """Start the update with a shard's summed gradients on all devices."""
        assert self.stored is not None
        if self.pool.devices == 1:
            gradients = [[self._buffer(shard, rank, 0) for rank in sorted(self.sessions)]]
        else:
            devices = range(self.pool.devices)
            gradients = [[self._buffer(shard, self.result, device)] for device in devices]
        return self.stored.start(
            gradients,
            step=shard.step,
            scale=float(np.float32(1 / len(self.sessions))),
            start=shard.start,
            stop=shard.stop,
            hyper=hyper_of(shard.hyper),
        )

    def _job(self, shard: Shard, job: Job) -> RingJob:
        buffers = shard.room.buffers
        average = self.operation == "average"
        addends = None
        if self.addends:
            divisor = self.addends * len(self.sessions) if average else 1
            addends = Addends(self.count, 4 * self.layout.place_elements, divisor)
        sources: list[Buffer | None] = [*shard.room.arrays] or [
            self._identities[device] if value is None else buffers[value][device]
            for device, value in enumerate(job.inputs)
        ]
        last = job.output == self.result
        operation = self.operation if last or self.operation == "max" else "sum"
        if self.addends:
            operation = "sum"
        return self.pool.rings.make_job(
            Part(group=self.group(shard), start=0, stop=shard.stop - shard.start),
            OPERATIONS[operation],
            WIRES[self.wire],
            sources=[each.address for each in sources if each is not None],
            destinations=[each.address for each in buffers[job.output] if each is not None],
            scale=np.float32(1 / len(self.sessions)),
            addends=addends,
        )

    def free(self) -> None:
        """Free the memory of the devices; no job of the exchange may be running."""
        if self.common is not None:
            self.common.close()
        for room in self._rooms:
            for arrays in room.arrays:
                for start in range(0, arrays.size, self.addends * self.layout.place_elements):
                    arrays.end_loan(start)
                arrays.free()
            room.arrays.clear()
            for places in room.buffers.values():
                for buffer in places:
                    if buffer is not None and not buffer.freed:
                        buffer.end_loan()
                        buffer.free()
        self._rooms.clear()
        for buffer in self._identities.values():
            buffer.free()
        self._identities.clear()
        self._memory.clear()
        self.shards.clear()  # they refer to the exchange
