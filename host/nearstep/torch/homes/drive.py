"""Arrays that the memory of the device does not hold, on drives of the host."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from itertools import cycle
from time import perf_counter
from typing import Any

from numpy.typing import NDArray
from rich.console import Console
from rich.filesize import decimal
from torch import Tensor

from nearstep.backends.base import Completion
from nearstep.plan.overflow import Array, Eviction, OverflowPlan
from nearstep.plan.residency import NoRoomError
from nearstep.storage.aligned import AlignedPool
from nearstep.storage.drive import DriveTransfer
from nearstep.threads import at_once
from nearstep.torch import convert
from nearstep.torch.exchange import send_now
from nearstep.torch.homes.durable import DurableHome, Savepoint
from nearstep.torch.homes.errors import MemoryTooSmallError
from nearstep.torch.homes.host_changes import ChangedParameterError
from nearstep.torch.homes.opening import OpenStore
from nearstep.torch.homes.segments import GRADIENTS, StoredArray, StripedSegment, is_state
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.table import Owner, StateTable

Reading = tuple[NDArray[Any], Sequence[Completion]]
"""An array that is being read, padding included, and what to wait for."""

AHEAD_BYTES = 64 << 20
"""Of units that are read ahead into memory of this process, unless the next one alone has more."""

UNIT_ELEMENTS = 1 << 21
"""Of small units in memory of this process: the transfers of a unit then take longer than the calls
that plan and begin them."""

WRITES = 4
"""Arrays that are being written at once while a step goes on."""


class DriveHome(DurableHome[StripedSegment]):
    """Each array of each unit of parameters is in memory of the device or on the drives.

    What is in both is the same in both.

    Memory of a device that is memory of this process is read from drives and written to them
    without a copy: a unit is written as soon as it is updated, while the next ones are read and
    updated; the memory of an evicted unit is free once it is written. The
    parameters and gradients of large parameters are used where they are. Threads of the drives
    compare the parameters of later units with the drives meanwhile: a step that finds a change is
    repeated, and those that follow compare first until one finds no change.

    Parameters
    ----------
    memory : bytes of all channels; in memory of this process, also for units that are read ahead.
    """

    kind = StripedSegment

    def __init__(
        self, table: StateTable, opened: OpenStore, eviction: Eviction, memory: int
    ) -> None:
        super().__init__(table, opened)
        self._eviction = eviction
        self._memory = memory
        self._begun = False
        self._in_place = self.recovers = table.device.backend.is_host_memory
        self._largest = (0, "")
        self._stored = [0, 0]  # bytes of parameters, and of state
        self._spare = self._most_spare = 0  # bytes for units that are read ahead, or being written
        self._has_changes = False
        self._checks_beside = True
        self._checks: dict[StripedSegment, DriveTransfer] = {}
        self._unchecked: set[DeviceParameter] = set()  # not updated in this step
        self._ahead: dict[StripedSegment, dict[str, Reading]] = {}
        self._writes: list[tuple[StripedSegment, str, Completion, object]] = []
        self._evicted: list[tuple[StripedSegment, Array]] = []  # in memory until they are written
        self._pool = AlignedPool()
        if self._in_place:
            self._pool.limit = memory
        self._plan = self._fresh()

    def _fresh(self) -> OverflowPlan:
        plan = OverflowPlan(self._capacity, self._eviction)
        plan.units = len(self.segments)
        return plan

    @property
    def _capacity(self) -> int:
        """Bytes of each channel for arrays that are updated."""
        return (self._memory - self._spare) // self._device.channel_count

    @property
    def peak(self) -> int:
        """Most bytes of memory that were in use since the last failure."""
        return self._plan.peak * self._device.channel_count + self._most_spare

    def units(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Neighbours, as far as these have no more elements than the largest of all; in memory of
        this process, or than `UNIT_ELEMENTS`, if memory has room for several such units."""
        most = max(convert.size(p) for p in parameters)
        if self._in_place:
            most = max(most, min(UNIT_ELEMENTS, self._memory // 32))
        size = most
        found: list[list[Tensor]] = []
        for p in parameters:
            if size + convert.size(p) > most or not found:
                found.append([])
                size = 0
            found[-1].append(p)
            size += convert.size(p)
        return found

    def check_room(self, segment: StripedSegment, arrays: Sequence[str], label: str) -> None:
        """Raise `MemoryTooSmallError` unless arrays of one unit fit into memory together; of those
        that are there before `begin_life`, then, and for the largest."""
        each = [self._array(segment, name).nbytes for name in arrays]
        needed = sum(each) * self._device.channel_count
        if self._begun and needed > self._memory:
            raise MemoryTooSmallError(label, needed, self._memory)
        self._largest = max(self._largest, (needed, label))
        for name in filter(is_state, arrays):
            self._stored[name != "p"] += segment.nbytes(name)
        if self._begun:
            self._share()

    def begin_life(self, owner: Owner) -> None:
        self._begun = True
        if self._largest[0] > self._memory:
            raise MemoryTooSmallError(self._largest[1], self._largest[0], self._memory)
        self._share()
        before, begun = self._moved, perf_counter()
        super().begin_life(owner)
        moved, seconds = self._moved - before, perf_counter() - begun
        console = Console(stderr=True, highlight=False)
        if self._in_place and console.is_terminal:
            console.print(self._estimate(moved, seconds), soft_wrap=True)

    @property
    def _moved(self) -> int:
        """Bytes that the drives have read and written."""
        return sum(each.bytes_read + each.bytes_written for each in self.drives.store.drives)

    def _estimate(self, moved: int, seconds: float) -> str:
        """Estimate the time of a step, which reads the state and writes all, by the time that it
        took to write the parameters, or to read them again: `moved` bytes."""
        parameters, state = self._stored
        rate = moved / seconds
        return (
            f"state {decimal(state)} on {len(self.drives.store.drives)} drives, at most "
            f"{(parameters + 2 * state) / rate:.2g} s a step at the measured {decimal(int(rate))}/s"
        )

    def _share(self) -> None:
        """Share memory between units that are kept, and those that are read ahead or evicted."""
        if self._in_place:
            largest = self._largest[0]
            ahead = min(max(largest, AHEAD_BYTES), max(largest, self._memory // 2))
            self._spare = min(ahead, self._memory - largest)
            self._plan.resize(self._capacity)

    def add(self, segment: Any, parameters: Sequence[DeviceParameter]) -> None:
        super().add(segment, parameters)
        self._plan.units = len(self.segments)

    def prepare(
        self, parameters: Iterable[DeviceParameter], *, anew: bool = False, small: bool = False
    ) -> None:
        """Write parameters that were changed and that a rollback reads from the drives.

        They are compared now, or while units are loaded. Others are sent with what else a step
        sends, or, if `small`, written.
        """
        for each in parameters if small else ():
            if not (each.is_on_host or each.offloaded):
                each.check_size()
                send_now(each.send_master_if_changed)
        wanted = {
            each for each in parameters if self._is_restored(each) or (small and each.is_on_host)
        }
        changed = list[StripedSegment]()
        self._checks.clear()
        self._unchecked.clear()
        beside = self._checks_beside and self.ranks.is_alone  # other ranks do not repeat a step
        if beside and not (anew or small or self._is_dirty):
            self._unchecked |= wanted
            return

        def check(segment: StripedSegment) -> None:
            own = wanted.intersection(segment.parameters)
            if any(self._is_changed(segment, each) for each in own):
                changed.append(segment)

        at_once([partial(check, segment) for segment in self.segments if wanted])
        for segment in sorted(changed, key=lambda each: each.unit):
            self._write(segment, "p")
            self._has_changes = True
            for parameter in () if self._in_place else segment.parameters:
                parameter.lose_master()  # memory of the device may have the old one
        self._checks_beside = not changed

    def _is_changed(self, segment: StripedSegment, parameter: DeviceParameter) -> bool:
        """Return whether the host has another parameter than the last generation."""
        start = parameter.extent.start
        return not StoredArray(segment, "p").holds(start, parameter.host_master())

    def _begin_check(self, segment: StripedSegment) -> None:
        """Begin to compare the parameters of a unit with the drives, unless that is done."""

        def check(parameter: DeviceParameter, _: object) -> None:
            if self._is_changed(segment, parameter):
                raise ChangedParameterError(parameter.label)

        own = self._unchecked.intersection(segment.parameters)
        if own and segment not in self._checks:
            drives = cycle(self.drives.store.drives)
            jobs = [(next(drives), partial(check, each)) for each in own]
            self._checks[segment] = DriveTransfer("check of parameters", jobs).begin()

    @property
    def _is_dirty(self) -> bool:
        return self._has_changes or super()._is_dirty

    def _is_restored(self, parameter: DeviceParameter) -> bool:
        """Whether a rollback reads a parameter on the host from the drives: a copy would take
        memory."""
        return self._in_place and parameter.is_on_host and not parameter.is_small

    def _clean(self) -> None:
        super()._clean()
        self._has_changes = False

    def keep(self, savepoint: Savepoint, parameters: Iterable[DeviceParameter]) -> None:
        savepoint.keep(each for each in parameters if not self._is_restored(each))

    def restore(self, parameters: Iterable[DeviceParameter]) -> None:
        for each in parameters:
            if each not in self._unchecked:
                each.read_again()

    def load_unit(self, segment: StripedSegment, arrays: Mapping[str, float]) -> None:
        """Load arrays of a unit into memory, since they are about to be updated."""
        segment.reserve(arrays)
        self._begin_check(segment)
        if segment in self._checks:
            self._checks.pop(segment).wait()
            self._unchecked.difference_update(segment.parameters)
        if any(each is segment for each, _ in self._evicted):  # updated before in this step
            self._free(0)
        for name in arrays if self._in_place else ():
            self._wait_for(segment, name)  # written from there, too
        items = [self._array(segment, name) for name in arrays]
        made = [each for each in items if not self._is_loaded(segment, each.name)]
        self._plan.descends = self.is_open
        try:
            moves = self._plan.update(items, made)
        except NoRoomError:
            self.check_room(segment, list(arrays), segment.parameters[0].label)  # has more arrays
            moves = self._plan.update(items, made)
        for move in moves:
            if move.kind in ("evict", "drop"):
                evicted = self.segments[move.array.unit]
                if move.kind == "evict" or move.array.name in evicted.dirty:
                    self._write(evicted, move.array.name)
                if self._in_place:
                    self._evicted.append((evicted, move.array))
                else:
                    evicted.release(move.array.name)
        loads = [move.array.name for move in moves if move.kind == "load"]
        ahead = self._ahead.pop(segment, {})
        self._free(min(self._spare // 2, self._spare - self._bytes_ahead))
        self._most_spare = max(self._most_spare, self._bytes_ahead + self._bytes_evicted)
        reads = [(name, *(ahead.get(name) or self._read(segment, name))) for name in loads]
        segment.allocate(loads, [move.array.name for move in moves if move.kind == "make"])
        for name, flat, completions in reads:
            for completion in completions:
                completion.wait()
            begun = 0 if self.watch is None else self.watch.now
            segment.put(name, flat)
            if self.watch is not None:
                self.watch.moved(segment, name, begun, stores=False)

    def prefetch(self, later: Sequence[tuple[StripedSegment, Mapping[str, float]]]) -> None:
        """Begin to read arrays of the next unit that are not in memory; in memory of this process,
        of as many units as there is room for."""
        for segment, arrays in later if self._in_place else later[:1]:
            if segment in self._ahead:
                self._begin_check(segment)
                continue
            names = [name for name in arrays if segment.has_whole(name) and not segment.has(name)]
            loaded = [name for name in names if self._is_loaded(segment, name)]
            if self._in_place:
                self._free(self._spare // 2)
                nbytes = self._bytes_ahead + self._bytes_evicted
                nbytes += sum(map(segment.nbytes, loaded))
                if nbytes > self._spare:
                    return
                self._most_spare = max(self._most_spare, nbytes)
            self._ahead[segment] = {name: self._read(segment, name) for name in loaded}
            self._begin_check(segment)

    @property
    def _bytes_ahead(self) -> int:
        return sum(segment.nbytes(name) for segment, own in self._ahead.items() for name in own)

    @property
    def _bytes_evicted(self) -> int:
        return sum(array.nbytes for _, array in self._evicted)

    def _free(self, most: int) -> None:
        """Free the memory of evicted arrays that have been written; wait until the others have at
        most `most` bytes, and for all if that is 0."""
        while self._evicted:
            segment, array = self._evicted[0]
            own = [each for each in self._writes if each[:2] == (segment, array.name)]
            if self._bytes_evicted <= most > 0 and not all(done.ended for _, _, done, _ in own):
                return
            self._wait_for(segment, array.name)
            del self._evicted[0]
            segment.release(array.name)

    def updated(self, segment: StripedSegment, arrays: Mapping[str, float]) -> None:
        """Begin to write a unit from where it is in memory of this process."""
        for name in filter(is_state, arrays if self._in_place else ()):
            self._write(segment, name)
            self._plan.wrote(self._array(segment, name))

    def commit(self, meta: Mapping[str, Any], name: str = "") -> None:
        """Write what the drives do not have, and make all of it a generation."""
        for array in self._plan.written():
            self._write(self.segments[array.unit], array.name)
        for segment in self.segments:
            for dirty in sorted(segment.dirty):
                if segment.has(dirty):
                    self._write(segment, dirty)
            self.forget_gradients(segment)
        self._wait(0)
        self._free(0)
        super().commit(meta, name)

    def forget(self) -> None:
        self._has_changes = False
        self._writes.clear()
        self._evicted.clear()
        self._ahead.clear()
        self._checks.clear()
        for segment in self.segments:
            for name in list(segment.arenas[0]):
                segment.release(name)
        self._plan = self._fresh()

    def write_masters(self, segments: Iterable[StripedSegment]) -> None:
        for segment in segments:
            segment.reserve({"p": 0.0})
            if self._in_place:
                self._write(segment, "p")
                continue
            for each in segment.parameters:
                if not each.offloaded:  # to memory, if it is there: a commit writes that to drives
                    each.extent.write("p", each.host_master())

    def _is_loaded(self, segment: StripedSegment, name: str) -> bool:
        """Whether an array is loaded from the drives for an update."""
        if name in GRADIENTS:
            return name in segment.on_drives
        return name != "p" or segment.needs_master

    def _array(self, segment: StripedSegment, name: str) -> Array:
        lent = self._in_place and (name == "p" or not is_state(name))
        nbytes = segment.copied_bytes(name) if lent else segment.nbytes(name)
        return Array(segment.unit, name, nbytes, name in GRADIENTS)

    def _read(self, segment: StripedSegment, name: str) -> Reading:
        flat = self._pool.empty(segment.whole.size(name), segment.dtype_of(name))
        if segment.has_padding and not self._in_place:
            flat.fill(0)
        return flat, StoredArray(segment, name).begin_read(0, flat)

    def _write(self, segment: StripedSegment, name: str) -> None:
        """Begin to write an array that is in memory; of parameters that the host has, from there:
        what the host lends to the device is nowhere else."""
        place, flat = StoredArray(segment, name), None
        since = 0 if self.watch is None else self.watch.now
        for each, (start, count) in zip(segment.parameters, segment.spans, strict=True):
            _, first, last = segment.span(name, start, start + count)
            if name == "p" and each.is_on_host:
                data = each.host_master()
            else:
                if flat is None and self._in_place:
                    flat = segment.view(name)
                elif flat is None:
                    flat = self._pool.empty(segment.whole.size(name), segment.dtype_of(name))
                    segment.whole.read(name, flat)
                data = flat[first:last]
            begun = place.begin_write(first, data)
            self._writes += [(segment, name, completion, data) for completion in begun]
        segment.dirty.discard(name)
        if self.watch is not None:
            self.watch.moved(segment, name, since, stores=True)
        if not self._in_place:
            self._wait(WRITES)

    def _wait(self, most: int) -> None:
        while len(self._writes) > most:
            self._writes.pop(0)[2].wait()

    def _wait_for(self, segment: StripedSegment, name: str) -> None:
        """Wait until an array has been written: its memory is then used for others."""
        found = [each for each in self._writes if each[0] is segment and each[1] == name]
        for _, _, completion, _ in found:
            completion.wait()
        self._writes = [each for each in self._writes if each[0] is not segment or each[1] != name]
