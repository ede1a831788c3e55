"""Computation, transfers and updates of an engine as work that overlaps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from nearstep.buffer import Buffer
from nearstep.placement import Extent, Launch
from nearstep.torch.computation import Computation, is_in_backward
from nearstep.torch.execution import Accelerator, kernel_cycles, run_parts
from nearstep.torch.homes.home import BUS, lane
from nearstep.torch.offload.machine import Machine
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.step import RunKey, Start
from nearstep.torch.traffic import Traffic
from nearstep.updater.accelerated import AcceleratedRuns
from nearstep.updater.device import KernelDevice
from nearstep.work.operation import Operation, Range
from nearstep.work.queue import Queue
from nearstep.work.timeline import Timeline

FETCH, SEND = -2, -1
"""Priorities, as in `nearstep.plan.iteration`: what computation waits for goes first; then
gradients, so that a channel has updates to do."""


class _Part(NamedTuple):
    """Elements of a channel on their way to the host."""

    channel: int
    array: NDArray[Any]


@dataclass(frozen=True)
class Reading:
    """An array that is being fetched."""

    extent: Extent
    operations: Sequence[Operation]
    dtype: np.dtype
    _queue: Queue
    _parts: Sequence[_Part]

    def wait(self) -> NDArray[Any]:
        """The array, of shape (count,), when it is here.

        Raises
        ------
        Exception : that of the operation which failed first.
        """
        self._queue.wait(self.operations)
        stripes = self.extent.segment.stripes
        if stripes.channels == 1 and self._parts:
            return self._parts[0].array
        out = np.empty(self.extent.count, self.dtype)
        for channel, array in self._parts:
            stripes.scatter(array, out, self.extent.start, channel)
        return out

    def land(self, resident: DeviceParameter) -> None:
        """Wait for the array, and have it be the parameter, which has memory again.

        Raises
        ------
        Exception : that of the operation which failed first.
        """
        resident.land(self.wait())

    def drop(self) -> None:
        """Wait until nothing writes the array any more; nobody wants it."""
        self._queue.wait(self.operations)


@dataclass(frozen=True, eq=False)
class Departure:
    """Bytes that count on the compute device until operations have ended: those of a gradient that
    is sent, or of a parameter that something computes with.

    Attributes
    ----------
    gone : called when they have ended.
    lost : called if they never will: one of them failed, or was not run.
    """

    operations: Sequence[Operation]
    nbytes: int
    gone: Callable[[], None]
    lost: Callable[[], None]


class Pipeline:
    """Adds what an engine does to a queue.

    Computation is that of a machine, modelled. On a device with a clock transfers and updates are
    the device's own, in its cycles; on others they are made when they begin, and take the time of
    the machine. A channel does one thing at a time, a transfer or an update, and one transfer to or
    from the device is under way (AXDIMM, section 5.2).

    Parameters
    ----------
    device : of the optimizer.
    traffic : runs and cycles are added to it.
    max_cycles : bound on each run.
    interrupt : called when something failed, and nothing is under way any more, with whether
        updates had been asked for since the last `finish`.
    overlaps : False does one thing after the other.

    Attributes
    ----------
    computation : counts the time of torch's operations while it is entered.
    computed : the last computation, and what goes over the link with it.
    """

    def __init__(
        self,
        device: KernelDevice,
        machine: Machine,
        traffic: Traffic,
        max_cycles: int | None,
        interrupt: Callable[[BaseException, bool], None],
        *,
        overlaps: bool,
    ) -> None:
        self.queue = Queue(machine.clock(device), self._failed, overlaps=overlaps)
        self.computation = Computation(machine.processor)
        self.computed: list[Operation] = []
        self._forward, self._backward = "other", "backward"
        self._before: list[Operation] = []  # what the last computation came after
        self._beside: list[Operation] = []  # reads of what computes next
        self._device = device
        self._machine = machine
        self._traffic = traffic
        self._accelerator = Accelerator(device, traffic, max_cycles)
        self._interrupt = interrupt
        self._updates: list[Operation] = []
        self._departures: list[Departure] = []

    @property
    def departing_bytes(self) -> int:
        """That count until something has ended."""
        return sum(each.nbytes for each in self._departures)

    def uses(self, module: str) -> None:
        """Say whose parameters the program computes with from here on."""
        self._forward = "other" if is_in_backward() else f"forward {module}"
        self._backward = f"backward {module}"

    def compute(self) -> Operation | None:
        """Add what torch has computed since the last call; the last computation, if any."""
        for in_backward, seconds in self.computation.take():
            name, self._before = self._backward if in_backward else self._forward, self.computed
            processor = self._machine.compute
            made = self.queue.add(name, processor, after=self._before, seconds=seconds)
            self.computed = [made, *self._beside]
            self._beside = []
            if in_backward:
                self._forward = "other"  # such as what a step does
        return self.computed[0] if self.computed else None

    def read_beside(self, name: str, extent: Extent, array: str) -> None:
        """Have what computes next read an array where it is: over the link, while it computes."""
        reading = self.read(f"{name} in place", extent, array, after=self.computed)
        self._beside += reading.operations

    def read(
        self, name: str, extent: Extent, array: str, after: Sequence[Operation] = ()
    ) -> Reading:
        """Begin to fetch an array, when others have ended."""
        parts, operations = [], []
        dtype = extent.segment.dtype_of(array)
        for channel, view in extent.segment.parts(array, extent.start, extent.start + extent.count):
            out = np.empty(view.size, dtype)
            parts.append(_Part(channel, out))
            made = self._transfer(
                f"fetch {name}",
                channel,
                partial(view.submit_read, out),
                partial(view.read, out),
                view,
                down=False,
                after=after,
            )
            operations.append(made)
        return Reading(extent, operations, dtype, self.queue, parts)

    def write(
        self,
        name: str,
        extent: Extent,
        array: str,
        data: NDArray[Any],
        *,
        direct: bool = False,
    ) -> Sequence[Operation]:
        """Begin to send what an array of `count` elements, which has been computed, has now.

        With `direct` the last computation writes it there itself, and ends no sooner than that.
        """
        operations, after = [], self._before if direct else self.computed
        flat = data.reshape(-1)
        extent.segment.written(array)
        for channel, view in extent.segment.parts(array, extent.start, extent.start + extent.count):
            part = extent.segment.stripes.gather(flat, extent.start, channel)
            if np.may_share_memory(part, flat):  # somebody else may have it, and change it
                part = part.copy()
            made = self._transfer(
                f"send {name}",
                channel,
                partial(view.submit_write, part),
                partial(view.write, part),
                view,
                down=True,
                after=after,
            )
            operations.append(made)
        if direct:
            self.computed = [*self.computed, *operations]
        return operations

    def _transfer(
        self,
        name: str,
        channel: int,
        submit: Callable[[], Any],
        copy: Callable[[], object],
        view: Buffer,
        *,
        down: bool,
        after: Sequence[Operation] = (),
    ) -> Operation:
        transfer = self._machine.transfer(view.nbytes, channel, down=down)
        where = [Range.of(view)]
        return self.queue.add(
            name,
            BUS,
            lane(channel),
            reads=[] if down else where,
            writes=where if down else [],
            after=after,
            action=_Once(partial(_at_once, copy) if self._machine.hertz is None else submit),
            transfer=transfer,
            priority=SEND if down else FETCH,
        )

    def depart(self, departure: Departure) -> None:
        """Look after bytes until they are gone."""
        self._departures.append(departure)

    def reap(self) -> None:
        """Say so of what is gone."""
        gone = [each for each in self._departures if self.queue.has_ended(each.operations)]
        self._departures = [each for each in self._departures if each not in gone]
        for each in gone:
            each.gone()

    def wait_for_room(self) -> None:
        """Let time pass until any of that is gone."""
        self.queue.wait_for_one([each.operations for each in self._departures])
        self.reap()

    def update(
        self,
        name: str,
        launch: Launch,
        start: Start,
        factor: float,
        begun: list[AcceleratedRuns],
    ) -> None:
        """Begin the runs of a launch, one on each channel."""
        key = cast(RunKey, launch.key)
        for channel, part in launch.parts.items():
            reads, writes, starts = run_parts(part, key, start, factor, launch.numbering(channel))
            elements = part["p"].size * key.times
            begin = partial(self._accelerator.begin, channel, starts, begun)
            seconds = self._machine.update_seconds(elements)
            made = self.queue.add(
                f"update {name}",
                lane(channel),
                reads=map(Range.of, reads),
                writes=map(Range.of, writes),
                action=begin if seconds is None else partial(_to_the_end, begin),
                seconds=seconds,
            )
            self._updates.append(made)
            self._traffic.launches += len(starts)

    def finish(self) -> None:
        """Let time pass until all has ended.

        Raises
        ------
        Exception : that of the operation which failed first.
        """
        timeline = self.queue.finish()
        self._updates.clear()
        self.computed, self._before, self._beside = [], [], []
        if timeline.entries and self._machine.hertz is not None:
            self._count(timeline)

    @contextmanager
    def active(self) -> Iterator[None]:
        """The queue is the device's, and computation is counted."""
        self._device.queue = self.queue
        try:
            with self.computation:
                yield
        finally:
            self._device.queue = None

    def _count(self, timeline: Timeline) -> None:
        """A step has nothing but runs here: the rest is forward and backward."""
        cycles = kernel_cycles(timeline, self._device.channel_count)
        self._traffic.cycles = (self._traffic.cycles or 0) + cycles
        self._traffic.step_cycles = (self._traffic.step_cycles or 0) + cycles

    def _failed(self, cause: BaseException) -> None:
        """Nothing is under way any more."""
        updates, self._updates, self.computed = bool(self._updates), [], []
        self._before, self._beside = [], []
        self.reap()
        lost, self._departures = self._departures, []
        for each in lost:
            each.lost()
        self._interrupt(cause, updates)


class _Once:
    """An action that lets go of its data when it has been started."""

    def __init__(self, action: Callable[[], Any]) -> None:
        self._action: Callable[[], Any] | None = action

    def __call__(self) -> Any:
        action, self._action = self._action, None
        assert action is not None, "it is started once"
        return action()


def _at_once(copy: Callable[[], object]) -> None:
    copy()


def _to_the_end(begin: Callable[[], Any]) -> None:
    begin().wait()
