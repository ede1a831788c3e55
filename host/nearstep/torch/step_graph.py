"""The operations of one step: transfers over the host's bus, and runs of each channel's kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

from numpy.typing import NDArray

from nearstep.buffer import Buffer
from nearstep.placement import Arenas, Launch
from nearstep.run import Run
from nearstep.torch.formats import copy_array, gradient_array
from nearstep.torch.launcher import Accelerator
from nearstep.torch.pairs import PairList
from nearstep.torch.pieces import Cut, Work
from nearstep.torch.staging import DeferredOutbox, Landing
from nearstep.torch.step import Key, Start, starter
from nearstep.torch.traffic import Traffic
from nearstep.updater.device import KernelDevice
from nearstep.updater.pairs import Pairs
from nearstep.updater.rounding import Numbering
from nearstep.updater.run import ScanRun
from nearstep.work.clock import Clock
from nearstep.work.errors import WorkError
from nearstep.work.executor import execute
from nearstep.work.graph import Graph
from nearstep.work.operation import Range
from nearstep.work.timeline import Timeline

AnyRun = TypeVar("AnyRun", bound=Run)

BUS = "bus"
"""What all transfers of a device pass, one after the other."""


class Place(NamedTuple):
    """What a run works on: elements of a launch from `start` on, those of a channel."""

    launch: Launch
    start: int
    channel: int


class StepGraph:
    """Adds the operations of a step, and executes them.

    A channel belongs to the host or to its kernel. So each operation holds its channel, and a
    transfer the bus, too.

    Parameters
    ----------
    device
    traffic
    max_cycles : bound on each run.
    outbox : what is to be sent.
    lists : compressed gradients.
    clock : of the device. None: a new one.
    """

    def __init__(
        self,
        device: KernelDevice,
        traffic: Traffic,
        max_cycles: int | None,
        outbox: DeferredOutbox,
        lists: dict[Place, PairList],
        clock: Clock | None = None,
    ) -> None:
        self._device = device
        self._traffic = traffic
        self._outbox = outbox
        self._lists = lists
        self._accelerator = Accelerator(device, traffic, max_cycles)
        self._clock = Clock([device.backend]) if clock is None else clock
        self._graph = Graph()
        self._timelines: list[Timeline] = []

    @property
    def timeline(self) -> Timeline | None:
        """Of what has completed."""
        return Timeline.joined(self._timelines) if self._timelines else None

    def scan(self, launches: Sequence[Launch]) -> Sequence[ScanRun]:
        """Send everything, and have the device look at all gradients.

        Returns
        -------
        Sequence[ScanRun] : in the order of the launches, those of one in that of the channels.

        Raises
        ------
        DeviceError
        """
        runs: dict[tuple[int, int], list[ScanRun]] = {}
        for channel in range(self._device.channel_count):
            cuts = [Cut(launch, launch.start, launch.stop) for launch in launches]
            self._send("", channel, cuts)
            starts: list[Callable[[], ScanRun]] = []
            gradients = []
            for number, cut in enumerate(cuts):
                if channel not in cut.launch.parts:
                    continue
                gradient = self._gradient(cut, channel, cut.launch.parts[channel])
                g = gradient.value if isinstance(gradient, Pairs) else gradient
                form = cast(Key, cut.launch.key).gradient_format
                if g.size:
                    kept = runs[number, channel] = []
                    scan = partial(self._device.scan, g, gradient_format=form)
                    starts.append(partial(_kept, scan, kept))
                    gradients.append(g)
            if starts:
                self._graph.add(
                    "scan",
                    lane(channel),
                    reads=map(Range.of, gradients),
                    action=partial(self._accelerator.begin, channel, starts),
                )
        self._execute()
        self._outbox.sent()
        ended = [run for _, kept in sorted(runs.items()) for run in kept]
        self._traffic.scans += len(ended)
        return ended

    def update(
        self,
        work: Work,
        start: Start,
        factor: float,
        started: list[Run],
        *,
        sent: bool,
        fetches: bool,
    ) -> Landing:
        """Send, unless that has been done, run the rules, and fetch what they leave.

        A channel gets a piece as soon as what the one before it left there has been
        fetched. So the other channels run meanwhile.

        Parameters
        ----------
        work
        start
        factor : of the gradients.
        started : each run is added to it as it is started.
        sent
        fetches : False leaves it on the device.

        Raises
        ------
        DeviceError
        """
        landing = Landing()
        for launch in dict.fromkeys(cut.launch for own in work for piece in own for cut in piece):
            if fetches:
                landing.add(launch, _result(cast(Key, launch.key)))
        left: dict[int, Callable[[], None]] = {}
        for number in range(max(map(len, work))):
            for channel, own in enumerate(work):
                cuts = [cut for cut in own[number] if cut.has(channel)] if number < len(own) else []
                if not cuts:
                    continue
                if channel in left:
                    left.pop(channel)()
                if not sent:
                    self._send(str(number), channel, cuts)
                self._run(str(number), channel, cuts, start, factor, started)
                if fetches:
                    left[channel] = partial(self._fetch, str(number), channel, cuts, landing)
        for fetch in left.values():
            fetch()
        self._execute()
        if not sent:
            self._outbox.sent()
        return landing

    def _send(self, name: str, channel: int, cuts: Sequence[Cut]) -> None:
        for launch, start, stop in cuts:
            for transfer in self._outbox.cut(launch.segment, start, stop):
                room = transfer.room(channel)
                if room is not None:
                    self._write(f"write {transfer.array} {name}", channel, room, transfer.data)
            pairs = self._lists.get(Place(launch, start, channel))
            for room, data in () if pairs is None else pairs.lines():
                self._write(f"write pairs {name}", channel, room, partial(_given, data))

    def _write(
        self, name: str, channel: int, room: Buffer, data: Callable[[int], NDArray[Any]]
    ) -> None:
        """Add a transfer of what `data` makes for the channel when it begins."""
        self._graph.add(
            name.strip(),
            BUS,
            lane(channel),
            writes=[Range.of(room)],
            action=lambda: room.submit_write(data(channel)),
        )

    def _run(
        self,
        name: str,
        channel: int,
        cuts: Sequence[Cut],
        start: Start,
        factor: float,
        started: list[Run],
    ) -> None:
        starts: list[Callable[[], Run]] = []
        reads: list[Buffer] = []
        writes: list[Buffer] = []
        for cut in cuts:
            key = cast(Key, cut.launch.key)
            part = cut.launch.cut(cut.start, cut.stop)[channel]
            gradient = self._gradient(cut, channel, part)
            numbering = cut.launch.segment.numbering(cut.start, channel)
            found = run_parts(part, key, start, factor, started, numbering, gradient)
            reads += found.reads
            writes += found.writes
            starts += found.starts
        self._graph.add(
            f"run {name}",
            lane(channel),
            reads=map(Range.of, reads),
            writes=map(Range.of, writes),
            action=partial(self._accelerator.begin, channel, starts),
        )

    def _fetch(self, name: str, channel: int, cuts: Sequence[Cut], landing: Landing) -> None:
        for launch, start, stop in cuts:
            array = _result(cast(Key, launch.key))
            out = landing.room(launch, start, stop, channel)
            first, _ = launch.segment.stripes.span(start, stop, channel)
            whole = launch.segment.arenas[channel][array][first : first + out.size]
            self._graph.add(
                f"read {array} {name}",
                BUS,
                lane(channel),
                reads=[Range.of(whole)],
                action=partial(whole.submit_read, out),
            )

    def _gradient(self, cut: Cut, channel: int, part: Arenas) -> Buffer | Pairs:
        listed = self._lists.get(Place(cut.launch, cut.start, channel))
        if listed is not None:
            return listed.pairs
        return part[gradient_array(cast(Key, cut.launch.key).gradient_format)]

    def _execute(self) -> None:
        """Run what has been added.

        Raises
        ------
        Exception : that of the operation which failed first, with a note of what became of the
            others.
        """
        graph, self._graph = self._graph, Graph()
        try:
            timeline = execute(graph, self._clock)
        except WorkError as failed:
            _, cause = next(iter(failed.failed.items()))
            cause.add_note(str(failed))
        else:
            self._timelines.append(timeline)
            self._count(timeline)
            return
        raise cause

    def _count(self, timeline: Timeline) -> None:
        cycles = kernel_cycles(timeline, self._device.channel_count)
        self._traffic.cycles = (self._traffic.cycles or 0) + cycles
        self._traffic.step_cycles = (self._traffic.step_cycles or 0) + timeline.makespan


class RunParts(NamedTuple):
    """What the runs of a launch on one channel are.

    Attributes
    ----------
    reads, writes
    starts : each starts one.
    """

    reads: Sequence[Buffer]
    writes: Sequence[Buffer]
    starts: Sequence[Callable[[], Run]]


def run_parts(
    part: Arenas,
    key: Key,
    start: Start,
    factor: float,
    started: list[Run],
    numbering: Numbering,
    gradient: Buffer | Pairs | None = None,
) -> RunParts:
    """Runs on the arrays of one channel.

    Parameters
    ----------
    part : arrays of the channel.
    key
    start
    factor : of the gradients.
    started : each run is added to it as it is started.
    numbering : indices of the elements.
    gradient : None: the array of its format.
    """
    if gradient is None:
        gradient = part[gradient_array(key.gradient_format)]
    pairs = isinstance(gradient, Pairs)
    reads = [gradient.index, gradient.value] if isinstance(gradient, Pairs) else [gradient]
    writes = [each for each in part.values() if pairs or each is not gradient]
    begin = partial(_kept, starter(start, {**part, "g": gradient}, key, factor, numbering), started)
    return RunParts(reads, writes, [begin] * key.times)


def kernel_cycles(timeline: Timeline, channels: int) -> int:
    """Cycles in which the kernel has the channel that it has longest."""
    lanes = timeline.lanes
    return max(
        sum(e.duration for e in lanes.get(lane(channel), ()) if BUS not in e.operation.holds)
        for channel in range(channels)
    )


def lane(channel: int) -> str:
    """Name of a channel as a resource."""
    return f"channel {channel}"


def _result(key: Key) -> str:
    """Array of a launch that is fetched."""
    return "p" if key.copy_format is None else copy_array(key.copy_format)


def _kept(start: Callable[[], AnyRun], kept: list[AnyRun]) -> AnyRun:
    kept.append(start())
    return kept[-1]


def _given(data: NDArray[Any], _: int) -> NDArray[Any]:
    return data
