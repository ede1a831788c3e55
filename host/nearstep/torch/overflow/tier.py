"""Moves arrays between the memory of a device and drives, as a plan says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from numpy.typing import NDArray

from nearstep.backends.base import Completion
from nearstep.device import Device
from nearstep.plan.overflow import Array, OverflowPlan
from nearstep.plan.residency import NoRoomError
from nearstep.storage.aligned import AlignedPool
from nearstep.storage.store import Store
from nearstep.torch.overflow.errors import MemoryTooSmallError
from nearstep.torch.overflow.options import Overflow
from nearstep.torch.overflow.segment import GRADIENTS, DriveArray, OverflowSegment
from nearstep.torch.traffic import Traffic

Reading = tuple[NDArray[Any], Sequence[Completion]]
"""An array that is being read, padding included, and what to wait for."""

WRITES = 4
"""Arrays that are being written at once while a step goes on."""


class Tier:
    """Memory of a device and drives, of one optimizer.

    Each array of each unit of parameters is in memory or on the drives. What is in both is the
    same in both.

    Parameters
    ----------
    options
    store
    memory : bytes of all channels.
    device
    traffic

    Attributes
    ----------
    store
    segments : in the order in which a step updates them.
    """

    def __init__(
        self, options: Overflow, store: Store, memory: int, device: Device, traffic: Traffic
    ) -> None:
        self.store = store
        self.segments: list[OverflowSegment] = []
        self._options = options
        self._memory = memory
        self._device = device
        self._traffic = traffic
        self._begun = False
        self._largest = (0, "")
        self._ahead: dict[OverflowSegment, dict[str, Reading]] = {}
        self._writes: list[tuple[Completion, object]] = []
        self._pool = AlignedPool()
        self._plan = self._fresh()

    def _fresh(self) -> OverflowPlan:
        plan = OverflowPlan(self._memory // self._device.channel_count, self._options.eviction)
        plan.units = len(self.segments)
        return plan

    @property
    def peak(self) -> int:
        """Most bytes of memory that were in use since the last failure."""
        return self._plan.peak * self._device.channel_count

    def check_room(self, segment: OverflowSegment, arrays: Sequence[str], label: str) -> None:
        """Raise `MemoryTooSmallError` unless arrays of one unit fit into memory together; of those
        that are there before `begin`, then, and for the largest."""
        needed = sum(map(segment.nbytes, arrays)) * self._device.channel_count
        if self._begun and needed > self._memory:
            raise MemoryTooSmallError(label, needed, self._memory)
        self._largest = max(self._largest, (needed, label))

    def begin(self) -> None:
        """All parameters of the constructor are there. Raises `MemoryTooSmallError`."""
        self._begun = True
        if self._largest[0] > self._memory:
            raise MemoryTooSmallError(self._largest[1], self._largest[0], self._memory)

    def add(self, segment: OverflowSegment) -> None:
        """One more unit."""
        segment.unit = len(self.segments)
        self.segments.append(segment)
        self._plan.units = len(self.segments)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Gradients that are reserved in it do not outlast it."""
        for segment in self.segments:
            segment.in_step = True
        try:
            yield
        finally:
            for segment in self.segments:
                segment.in_step = False

    @property
    def is_dirty(self) -> bool:
        """Whether something was written that no generation has."""
        return any(segment.dirty for segment in self.segments)

    @property
    def has_changes_besides_gradients(self) -> bool:
        """Whether any of that is no gradient."""
        return any(segment.dirty.difference(GRADIENTS) for segment in self.segments)

    @property
    def has_changed_away(self) -> bool:
        """Whether any of that is of a parameter that the host has not."""
        return any(
            "p" in segment.dirty and any(resident.away for resident in segment.residents)
            for segment in self.segments
        )

    def bring(self, segment: OverflowSegment, arrays: Mapping[str, float]) -> None:
        """Have arrays of a unit in memory, since they are about to be updated.

        Raises
        ------
        MemoryTooSmallError, OutOfDeviceMemoryError, StorageError
        """
        segment.reserve(arrays)
        items = [self._array(segment, name) for name in arrays]
        made = [each for each in items if not self._comes(segment, each.name)]
        try:
            moves = self._plan.update(items, made)
        except NoRoomError:
            self.check_room(segment, list(arrays), segment.residents[0].label)
            raise
        for move in moves:
            if move.kind in ("evict", "drop"):
                gone = self.segments[move.array.unit]
                if move.kind == "evict" or move.array.name in gone.dirty:
                    self._write(gone, move.array.name)
                gone.release(move.array.name)
        loads = [move.array.name for move in moves if move.kind == "load"]
        ahead = self._ahead.pop(segment, {})
        reads = [(name, *(ahead.get(name) or self._read(segment, name))) for name in loads]
        segment.allocate(loads, [move.array.name for move in moves if move.kind == "make"])
        for name, flat, completions in reads:
            for completion in completions:
                completion.wait()
            dirty = set(segment.dirty)
            segment.whole.write(name, flat)
            segment.dirty = dirty

    def prefetch(self, segment: OverflowSegment, arrays: Mapping[str, float]) -> None:
        """Begin to read what `bring` is going to need, the next time that it is called for a unit.

        What is not in memory now will not be there before that.
        """
        names = [name for name in arrays if name in segment.on_drives and not segment.has(name)]
        self._ahead[segment] = {
            name: self._read(segment, name) for name in names if self._comes(segment, name)
        }

    def commit(self, meta: Mapping[str, Any]) -> None:
        """Write what the drives do not have, and make all of it a generation.

        Raises
        ------
        StorageError
        """
        for array in self._plan.written():
            self._write(self.segments[array.unit], array.name)
        for segment in self.segments:
            for name in sorted(segment.dirty):
                if segment.has(name):
                    self._write(segment, name)
            self._forget_gradients(segment)
        self._wait(0)
        self.store.commit(meta)
        for segment in self.segments:
            segment.dirty.clear()

    def go_back(self) -> None:
        """Everything is as the last generation has it, and nothing in memory.

        Raises
        ------
        StorageError
        """
        self.store.abort()  # waits for what is under way
        self._writes.clear()
        self._ahead.clear()
        self.clear()
        for segment in self.segments:
            segment.dirty.clear()
            segment.find()

    def clear(self) -> None:
        """Nothing is in memory; what was written there alone is lost."""
        for segment in self.segments:
            for name in list(segment.arenas[0]):
                segment.release(name)
        self._plan = self._fresh()

    def write_masters(self) -> None:
        """Have the drives know the parameters as they are on the host.

        Raises
        ------
        StorageError
        """
        for segment in self.segments:
            for number, resident in enumerate(segment.residents):
                if not resident.away:
                    data = resident.host_master()
                    segment.changed("p")
                    DriveArray(segment, "p").submit_write(number, data).wait()

    def _comes(self, segment: OverflowSegment, name: str) -> bool:
        """Whether an array has to come from the drives for an update."""
        if name in GRADIENTS:
            return name in segment.on_drives
        return name != "p" or segment.needs_master

    def _array(self, segment: OverflowSegment, name: str) -> Array:
        return Array(segment.unit, name, segment.nbytes(name), name in GRADIENTS)

    def _read(self, segment: OverflowSegment, name: str) -> Reading:
        flat = self._pool.empty(segment.whole.count, segment.dtype_of(name))
        if segment.has_padding:
            flat.fill(0)
        return flat, DriveArray(segment, name).submit_read(0, flat)

    def _write(self, segment: OverflowSegment, name: str) -> None:
        """Begin to write an array that is in memory; of parameters that the host has, from there:
        what it lends to the device is nowhere else."""
        place, flat = DriveArray(segment, name), None
        for number, (start, count) in enumerate(segment.spans):
            if name == "p" and segment.residents[number].is_on_host:
                data = segment.residents[number].host_master()
            else:
                if flat is None:
                    flat = self._pool.empty(segment.whole.count, segment.dtype_of(name))
                    segment.whole.read(name, flat)
                data = flat[start : start + count]
            self._writes.append((place.submit_write(number, data), data))
        segment.dirty.discard(name)
        self._wait(WRITES)

    def _wait(self, most: int) -> None:
        while len(self._writes) > most:
            completion, _ = self._writes.pop(0)
            completion.wait()

    def _forget_gradients(self, segment: OverflowSegment) -> None:
        """Those that the device need not keep any more."""
        if any(resident.held is not None for resident in segment.residents):
            return
        for name in segment.on_drives.intersection(GRADIENTS):
            segment.remove(name)
