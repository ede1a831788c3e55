"""Moves arrays between the memory of a device and drives, as a plan says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearstep.backends.base import Completion
from nearstep.device import Device
from nearstep.plan.overflow import Array, OverflowPlan
from nearstep.plan.residency import NoRoomError
from nearstep.storage.aligned import AlignedPool
from nearstep.torch.overflow.drive_segment import GRADIENTS
from nearstep.torch.overflow.drive_tier import DriveTier
from nearstep.torch.overflow.errors import MemoryTooSmallError
from nearstep.torch.overflow.held_store import HeldStore
from nearstep.torch.overflow.opening import moved_together
from nearstep.torch.overflow.options import Overflow
from nearstep.torch.overflow.segment import DriveArray, OverflowSegment
from nearstep.torch.overflow.undo import Undo
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.traffic import Traffic

Reading = tuple[NDArray[Any], Sequence[Completion]]
"""An array that is being read, padding included, and what to wait for."""

WRITES = 4
"""Arrays that are being written at once while a step goes on."""


class Tier(DriveTier[OverflowSegment]):
    """Memory of a device and drives, of one optimizer.

    Each array of each unit of parameters is in memory or on the drives. What is in both is the
    same in both.

    Parameters
    ----------
    options
    drives
    memory : bytes of all channels.
    device
    traffic
    """

    def __init__(
        self, options: Overflow, drives: HeldStore, memory: int, device: Device, traffic: Traffic
    ) -> None:
        super().__init__(drives)
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

    def units(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        return moved_together(parameters)

    def segment(
        self, counts: Sequence[int], line: int, dtypes: Mapping[str, np.dtype], keys: Sequence[str]
    ) -> OverflowSegment:
        return OverflowSegment(self._device, counts, line, dtypes, keys, self.drives, self._traffic)

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
        super().add(segment)
        self._plan.units = len(self.segments)

    def prepare(self, residents: Iterable[DeviceParameter], *, anew: bool = False) -> None:
        """Parameters that were changed go to memory, with what else a step sends."""

    def keep(self, undo: Undo, residents: Iterable[DeviceParameter]) -> None:
        undo.keep(residents)

    def restore(self, residents: Iterable[DeviceParameter]) -> None:
        """All that there was has been kept."""

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
            self.forget_gradients(segment)
        self._wait(0)
        super().commit(meta)

    def forget(self) -> None:
        self._writes.clear()
        self._ahead.clear()
        for segment in self.segments:
            for name in list(segment.arenas[0]):
                segment.release(name)
        self._plan = self._fresh()

    def write_masters(self) -> None:
        for segment in self.segments:
            for resident in segment.residents:
                if (
                    not resident.offloaded
                ):  # to memory, if it is there: a commit writes that to drives
                    resident.extent.write("p", resident.host_master())

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
