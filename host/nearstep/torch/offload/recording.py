"""Recordings of an engine's operations, in the time of a machine."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from nearstep.placement import Extent, Segment
from nearstep.torch.computation import Computation, is_in_backward
from nearstep.torch.formats import gradient_array
from nearstep.torch.homes.home import BUS, lane
from nearstep.torch.homes.segments import StripedSegment
from nearstep.torch.offload.compute_copy import ComputeCopy
from nearstep.torch.offload.machine import Machine
from nearstep.torch.step import RunKey
from nearstep.torch.table import StateTable
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation, Range
from nearstep.work.timeline import Timeline

FETCH, SEND = -2, -1
"""Priorities, as in `nearstep.plan.iteration`: fetches, which computation waits for, are first;
then gradients, so that channels can update."""

DRIVES = "drives"
"""Resource of transfers of the drives, which stripe each array and transfer one at a time."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Part of a timeline, in its cycles.

    Attributes
    ----------
    busy : time in which each resource was held, between the two.
    """

    start: int
    end: int
    busy: Mapping[str, int]

    @property
    def duration(self) -> int:
        return self.end - self.start

    @property
    def longest(self) -> int:
        """Busy time of the busiest resource."""
        return max(self.busy.values(), default=0)


def backward_and_update(timeline: Timeline) -> Phase:
    """Return the phase from the end of the last forward computation to the end of the timeline.

    Parameters
    ----------
    timeline : of one iteration.
    """
    forward = [e.end for e in timeline.entries if e.operation.name.startswith("forward ")]
    start = max(forward, default=0)
    busy: dict[str, int] = {}
    for entry in timeline.entries:
        for resource in entry.operation.holds:
            inside = max(0, entry.end - max(entry.start, start))
            busy[resource] = busy.get(resource, 0) + inside
    end = max((entry.end for entry in timeline.entries), default=start)
    return Phase(start=start, end=end, busy=busy)


class _Leaving(NamedTuple):
    """Bytes in use on the compute device until operations have ended.

    Attributes
    ----------
    computed : whether these are computations, for which the next computation waits anyway.
    """

    nbytes: int
    after: Sequence[Operation]
    computed: bool = False


class Recording:
    """A recording, made by `nearstep.torch.offload.engine.Engine.record`.

    The engine runs sequentially, and each step is recorded as an operation of a graph with its own
    duration. `finish` replays the graph: operations overlap as
    far as bytes, resources and the budget allow. Computation takes the time of a machine. On a
    device with a clock transfers and updates take the cycles that they took; on others, the time of
    the machine. A channel runs one transfer or update at a time, and the device one transfer at a
    time (AXDIMM, section 5.2).

    Parameters
    ----------
    table : of the optimizer.
    copies : parameters of the engine.
    budget : of the compute device, in bytes.
    overlaps : False replays operations sequentially.
    sends : gradients stay on the compute device until a step sends them.

    Attributes
    ----------
    computation : counts the time of torch's operations while it is entered.
    """

    def __init__(
        self,
        table: StateTable,
        copies: Sequence[ComputeCopy],
        machine: Machine,
        budget: int,
        *,
        overlaps: bool,
        sends: bool = False,
    ) -> None:
        self.computation = Computation(machine.processor)
        self._table = table
        self._copies = copies
        self._sends = sends
        self._machine = machine
        self._budget = budget
        self._overlaps = overlaps
        self._clock = machine.clock()
        self._timelines: list[Timeline] = []
        self._forward, self._backward = "other", "backward"
        self._begin()

    def _begin(self) -> None:
        self._graph = Graph()
        self._computed: list[Operation] = []  # last, with what goes over the link meanwhile
        self._before: list[Operation] = []  # what the last computation came after
        self._beside: list[Operation] = []  # reads of what computes next
        self._needed: list[Operation] = []  # by what computes next
        self._fetch_after: list[Operation] = []  # what gives room to the next fetch
        self._using: list[ComputeCopy] = []
        self._used: dict[ComputeCopy, Operation] = {}
        self._fetched: dict[ComputeCopy, Sequence[Operation]] = {}
        self._leaving: list[_Leaving] = []
        self._sent: list[Operation] = []  # gradients that steps have sent
        self._stored: dict[tuple[Segment, str], Sequence[Operation]] = {}

    @property
    def timeline(self) -> Timeline:
        """Times of all computations, transfers and updates, up to the last step or the end of the
        recording.

        `nearstep.work.trace` draws a timeline, and writes it as a Chrome trace.
        """
        if not self._timelines:
            return Timeline([], self._clock.hertz, self._clock.unit)
        return Timeline.joined(self._timelines)

    def finish(self) -> None:
        """Replay the recorded operations to their end."""
        self.compute()
        timeline = execute(self._graph, self._clock)
        if timeline.entries:
            self._timelines.append(timeline)
        self._begin()

    def uses(self, copies: Sequence[ComputeCopy], in_place: Iterable[ComputeCopy]) -> None:
        """Record that the program computes with parameters from now on.

        Parameters
        ----------
        in_place : parameters among these that are read over the link during computation.
        """
        if not copies:
            return
        module, _, name = copies[0].name.rpartition(".")
        self._forward = "other" if is_in_backward() else f"forward {module or name}"
        self._backward = f"backward {module or name}"
        self._using = list(dict.fromkeys([*self._using, *copies]))
        for copy in copies:
            self._needed += self._fetched.get(copy, ())
        for copy in in_place:
            begun = self.now
            copy.resident.peek()
            where = copy.resident.extent, copy.resident.current
            self._beside += self._transfers(
                f"fetch {copy.name} in place", *where, begun, down=False, after=self._computed
            )

    def compute(self) -> None:
        """Record what torch has computed since the last call."""
        for in_backward, seconds in self.computation.take():
            name, self._before = self._backward if in_backward else self._forward, self._computed
            after = [*self._before, *self._needed]
            made = self._add(name, self._machine.compute, after=after, seconds=seconds)
            self._computed, self._beside, self._needed = [made, *self._beside], [], []
            self._used.update(dict.fromkeys(self._using, made))
            self._using = [copy for copy in self._using if copy.present and not copy.can_go]
            if in_backward:
                self._forward = "other"  # such as operations of a step

    @property
    def now(self) -> int:
        """Cycle of the device; 0 without a clock."""
        return self._table.device.cycles or 0

    def fetched(self, copy: ComputeCopy, begun: int) -> None:
        """Record the fetch of a parameter, already charged, begun at a cycle."""
        after, self._fetch_after = self._fetch_after, []
        if copy.in_place.forward and copy in self._used:
            after.append(self._used[copy])
        extent, array = copy.resident.extent, copy.resident.current
        self._used.pop(copy, None)
        self._fetched[copy] = self._transfers(
            f"fetch {copy.name}", extent, array, begun, down=False, after=after
        )

    def freed(self, copy: ComputeCopy, nbytes: int) -> None:
        """Record the free of a parameter, no longer charged, at the end of its last computation."""
        fetched = self._fetched.pop(copy, ())
        last = self._used.get(copy)
        self._leave(nbytes, fetched if last is None else [last], computed=last is not None)

    def sent(self, copy: ComputeCopy, array: str, nbytes: int, begun: int) -> None:
        """Record the transfer of a gradient, no longer charged, to an array of its owner, begun at
        a cycle.

        A gradient written in place is transferred while it is computed, and ends no earlier.
        """
        direct = copy.in_place.gradient
        made = self._transfers(
            f"send {copy.name}",
            copy.resident.extent,
            array,
            begun,
            down=True,
            after=self._before if direct else self._computed,
        )
        if direct:
            self._computed = [*self._computed, *made]
        self._leave(nbytes, made)

    def _leave(self, nbytes: int, after: Sequence[Operation], *, computed: bool = False) -> None:
        if nbytes and after:
            self._leaving.append(_Leaving(nbytes, after, computed))

    def grown(self, used: int) -> None:
        """Make later operations wait until freed bytes are available: those of ended computations
        first, then the oldest.

        Parameters
        ----------
        used : bytes charged now, without those in use until an operation ends (`_Leaving`).
        """
        left = sum(each.nbytes for each in self._leaving)
        while self._leaving and used + left > self._budget:
            first = next((each for each in self._leaving if each.computed), self._leaving[0])
            self._leaving.remove(first)
            left -= first.nbytes
            self._fetch_after += first.after
            self._needed += first.after

    def spent(self, nbytes: int) -> None:
        """Record that gradients which the last steps have sent are no longer charged."""
        self._leave(nbytes, self._sent)
        self._sent = []

    def moved(self, segment: StripedSegment, array: str, begun: int, *, stores: bool) -> None:
        """Record a transfer of an array between memory and drives: as of `homes.durable.Watch`.

        Other times than that of the drives and of the device's memory are no part of it.
        """
        names = self._named([each.extent for each in segment.parameters])
        made = self._transfers(
            f"{'store' if stores else 'load'} {array} of {names}",
            segment.whole,
            array,
            begun,
            down=not stores,
            after=() if stores else self._stored.get((segment, array), ()),
            drives=True,
        )
        if stores:
            self._stored[segment, array] = made

    def _named(self, *runs: Sequence[Extent]) -> str:
        """Name the first and the last of the parameters with the extents of each run."""
        known = {copy.resident.extent: copy.name for copy in self._copies}
        names = (known.get(run[at], "others") for run in runs for at in (0, -1))
        return " to ".join(dict.fromkeys(names))

    def stepped(self) -> None:
        """Record the last step."""
        executor, hertz = self._table.executor, self._machine.hertz
        launches, timelines = executor.launches, executor.take_timelines()
        if hertz is not None and timelines:
            timeline = Timeline.joined(timelines)
            whole = self._named(*(each.extents for each in launches))
            made: dict[int, Operation] = {}
            for entry in sorted(timeline.entries, key=lambda each: each.operation.index):
                old = entry.operation
                sends = self._sends and old.name.startswith("send ")
                made[old.index] = self._add(
                    f"update {whole}" if old.name.startswith("run ") else old.name,
                    *old.holds,
                    reads=old.reads,
                    writes=old.writes,
                    after=[
                        *(made[need] for need in old.needs if need in made),
                        *(self._computed if sends else ()),
                    ],
                    priority=old.priority,
                    seconds=entry.duration / hertz,
                )
                self._sent += [made[old.index]] if sends else ()
            return
        for launch in launches:
            key, own = cast(RunKey, launch.key), self._named(launch.extents)
            gradient = gradient_array(key.gradient_format)
            for channel, part in launch.parts.items() if self._sends else ():
                self._sent.append(
                    self._add(
                        f"send {own}",
                        BUS,
                        lane(channel),
                        writes=[Range.of(part[gradient])],
                        after=self._computed,
                        transfer=self._machine.transfer(part[gradient].nbytes, channel, down=True),
                        priority=SEND,
                    )
                )
            for channel, part in launch.parts.items():
                self._add(
                    f"update {own}",
                    lane(channel),
                    reads=[Range.of(part[gradient])],
                    writes=[Range.of(each) for name, each in part.items() if name != gradient],
                    seconds=self._machine.update_seconds(part["p"].size * key.times),
                )

    def _transfers(
        self,
        name: str,
        extent: Extent,
        array: str,
        begun: int,
        *,
        down: bool,
        after: Sequence[Operation],
        drives: bool = False,
    ) -> list[Operation]:
        """Add the transfers of an array, one for each channel; of one that is on the drives alone,
        one between these and the compute device.

        Parameters
        ----------
        begun : cycle of the device at which the sequential transfers began, with a clock.
        drives : the array is transferred between memory and drives.
        """
        machine, hertz, cycles = self._machine, self._machine.hertz, self.now - begun
        if extent.segment.elsewhere(array) is not None:
            stop = extent.start + extent.count
            _, first, last = extent.segment.span(array, extent.start, stop)
            nbytes = (last - first) * extent.segment.dtype_of(array).itemsize
            after = [*after, *self._stored.get((extent.segment, array), ())]
            priority = SEND if down else FETCH
            time = machine.drive_seconds(nbytes, None, stores=down)
            return [self._add(name, DRIVES, after=after, seconds=time, priority=priority)]
        parts = list(extent.segment.parts(array, extent.start, extent.start + extent.count))
        whole = sum(view.nbytes for _, view in parts)
        made = []
        for channel, view in parts:
            transfer = None if drives else machine.transfer(view.nbytes, channel, down=down)
            seconds = None
            if drives:
                seconds = machine.drive_seconds(view.nbytes, channel, stores=not down)
            if hertz is not None:
                beyond = seconds or (0.0 if transfer is None else transfer.seconds)
                seconds, transfer = max(cycles * view.nbytes / whole / hertz, beyond), None
            where = [Range.of(view)]
            made.append(
                self._add(
                    name,
                    *([DRIVES] if drives else []),
                    BUS,
                    lane(channel),
                    reads=[] if down else where,
                    writes=where if down else [],
                    after=after,
                    seconds=seconds,
                    transfer=transfer,
                    priority=SEND if down else 0 if drives else FETCH,
                )
            )
        return made

    def _add(
        self, name: str, *holds: str, after: Iterable[Operation] = (), **how: Any
    ) -> Operation:
        if not self._overlaps:
            after = self._graph[-1:]
        return self._graph.add(name, *holds, after=after, **how)
