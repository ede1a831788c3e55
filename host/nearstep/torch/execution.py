"""A step as one graph of operations: blocks are loaded, sent, run, stored and fetched."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count, zip_longest
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Completion
from nearstep.buffer import Buffer
from nearstep.placement import Arenas, Extent, Launch, Placement, Segment, padded
from nearstep.run import Run
from nearstep.torch.compression import Compressed
from nearstep.torch.errors import GradientError
from nearstep.torch.exchange import Block, Piece, Results, Sends
from nearstep.torch.formats import gradient_array
from nearstep.torch.homes.home import BUS, DeviceHome, Share, lane
from nearstep.torch.pair_space import PairList, PairSpace
from nearstep.torch.settings import Settings
from nearstep.torch.step import RunKey, Scaling, Start, StepInputs, StepItem
from nearstep.torch.traffic import Traffic
from nearstep.updater.accelerated import AcceleratedRuns
from nearstep.updater.device import KernelDevice
from nearstep.updater.pairs import Pairs
from nearstep.updater.rounding import Numbering
from nearstep.updater.run import KernelRun, ScanRun
from nearstep.work.errors import WorkError
from nearstep.work.executor import Execution
from nearstep.work.graph import Graph
from nearstep.work.operation import Operation, Range
from nearstep.work.timeline import Timeline

EPSILON = 1e-6
"""Added to the norm, as in `torch.nn.utils.clip_grad_norm_`."""

Work = Sequence[Sequence[Piece]]
"""By channel: pieces, in the order in which the channel updates them."""

Lists = Mapping[tuple[Launch, int, int], PairList]
"""Compressed gradients of a run, by launch, first element, and channel."""


class Accelerator:
    """Starts runs as operations of a graph, each channel by itself."""

    def __init__(self, device: KernelDevice, traffic: Traffic, max_cycles: int | None) -> None:
        self._device = device
        self._traffic = traffic
        self._max_cycles = max_cycles
        self._working = 0
        self._begun = 0.0

    def begin(
        self,
        channel: int,
        starts: Sequence[Callable[[], Run]],
        begun: list[AcceleratedRuns],
    ) -> AcceleratedRuns:
        """Give a channel to its kernel for some runs, one after the other, and append them to
        `begun`.
        """
        first, *others = starts
        with ExitStack() as inside:
            inside.enter_context(self._timed())
            inside.enter_context(self._device.acceleration(channel))
            begun.append(AcceleratedRuns(first(), others, inside.pop_all(), self._max_cycles))
            return begun[-1]

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Time in which a channel works counts once, however many do."""
        if not self._working:
            self._begun = time.perf_counter()
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._traffic.run_seconds += time.perf_counter() - self._begun


class StepGraph:
    """Adds the operations of one step to a graph, and executes them.

    A channel belongs to the host or to its kernel: each operation holds its channel, and a transfer
    what the home's transfers share.
    """

    def __init__(
        self, steps: StepExecutor, step: StepInputs, lists: Lists, results: Results
    ) -> None:
        self._home = home = steps.home
        self._device, self._traffic = steps._device, steps._traffic
        # Nothing that refers to gradients: what ended keeps a graph as long as its timeline.
        self._sends, self._arrays, self._start = step.sends, step.arrays, step.start
        self._begun, self._results = step.begun, results
        self._lists = lists
        self._lists_sent = False
        bound = steps._settings.max_cycles
        self._accelerator = Accelerator(self._device, self._traffic, bound)
        self._clock = home.clock()
        self._graph = Graph()
        home.open(self._graph)
        self._sent: list[Operation] = []
        self._ran: list[Operation] = []
        self._late: dict[int, Callable[[], None]] = {}
        self._timelines: list[Timeline] = []

    @property
    def timeline(self) -> Timeline | None:
        """Of the operations that have ended."""
        return Timeline.joined(self._timelines) if self._timelines else None

    def scan(self, launches: Sequence[Launch]) -> Sequence[ScanRun]:
        """Send all arrays, and scan all gradients.

        Returns
        -------
        Sequence[ScanRun] : in the order of the launches, those of one in that of the channels.
        """
        numbers: dict[int, list[int]] = {}
        begun: list[AcceleratedRuns] = []

        def turn(channel: int) -> Iterator[None]:
            starts: list[Callable[[], Run]] = []
            gradients, own = [], numbers.setdefault(channel, [])
            for number, launch in enumerate(launches):
                block = Block(launch, launch.start, launch.stop)
                if not block.has(channel):
                    continue
                share = self._home.share(block, channel, number, ())
                self._send("", share)
                gradient = self._gradient(share)
                g = gradient.value if isinstance(gradient, Pairs) else gradient
                form = _key(block).gradient_format
                if g.size:
                    own.append(number)
                    starts.append(partial(self._device.scan, g, gradient_format=form))
                    gradients.append(g)
            yield
            if starts:
                self._graph.add(
                    "scan",
                    lane(channel),
                    reads=map(Range.of, gradients),
                    after=() if self._home.overlaps else self._sent,
                    action=partial(self._accelerator.begin, channel, starts, begun),
                )

        self._take_turns(map(turn, range(self._device.channel_count)))
        self.execute((), lambda _: ())
        self._sends.sent()
        self._lists_sent = True
        found: dict[tuple[int, int], ScanRun] = {}
        for each in begun:
            for run in cast(Sequence[ScanRun], each.runs):
                found[numbers[run.channel].pop(0), run.channel] = run
        self._traffic.scans += len(found)
        self.count(begun)
        return [found[each] for each in sorted(found)]

    def updates(self, work: Work, factor: float) -> Callable[[int], Iterable[Iterator[None]]]:
        """What adds the operations of a piece: loads, sends, runs, stores and fetches; gradients
        are multiplied by a factor."""

        def turn(number: int, channel: int, piece: Piece) -> Iterator[None]:
            home, graph = self._home, self._graph
            shares = [
                home.share(block, channel, number, home.states(self._arrays[_key(block).group]))
                for block in piece
                if block.has(channel)
            ]
            if not shares:
                return
            if channel in self._late:
                self._late.pop(channel)()
            for share in shares:
                form = _key(share.block).gradient_format
                kept = None if self._listed(share) is not None else gradient_array(form)
                home.load(graph, share, gradient=kept)
                self._send(str(number), share)
            yield
            parts = [
                run_parts(
                    share.parts,
                    _key(share.block),
                    self._start,
                    factor,
                    share.block.launch.segment.numbering(share.block.start, channel),
                    self._gradient(share),
                )
                for share in shares
            ]
            starts = [each for part in parts for each in part.starts]
            run = graph.add(
                f"run {number}",
                *home.holds(channel, lane(channel)),
                reads=[Range.of(each) for part in parts for each in part.reads],
                writes=[Range.of(each) for part in parts for each in part.writes],
                after=() if home.overlaps else self._sent,
                action=home.running(
                    partial(self._accelerator.begin, channel, starts, self._begun), shares
                ),
            )
            self._ran.append(run)
            for share in shares:
                home.store(graph, share)
            yield
            if home.fetches_late:
                self._late[channel] = partial(self._fetch, str(number), shares)
            else:
                self._fetch(str(number), shares)

        def turns(number: int) -> Iterator[Iterator[None]]:
            for channel, own in enumerate(work):
                if number < len(own):
                    yield turn(number, channel, own[number])

        return turns

    def _take_turns(self, turns: Iterable[Iterator[None]]) -> None:
        """Add the operations of each channel: one channel after the other where transfers overlap
        runs; else the transfers of all, the runs of all, the fetches of all."""
        if self._home.overlaps:
            for turn in turns:
                for _ in turn:
                    pass
        else:
            for _ in zip_longest(*turns):
                pass

    def _send(self, name: str, share: Share) -> None:
        """Add transfers of what the host sends to one block: parameters and gradients, whole or as
        pairs."""
        block = share.block
        for cut in self._sends.cut(block.launch.segment, block.start, block.stop):
            room = self._room(share, cut.array, cut.start, cut.stop)
            if room.size:
                data = partial(cut.data, share.channel, room.size)
                self._write(f"{cut.array} {name}", share, room, data)
        pairs = self._listed(share)
        if pairs is not None and not self._lists_sent:
            for room, listed in pairs.writes(lines=self._home.overlaps):
                self._write(f"pairs {name}", share, room, partial(np.asarray, listed))

    def _write(
        self, name: str, share: Share, room: Buffer, data: Callable[[], NDArray[Any]]
    ) -> None:
        home = self._home
        self._sent.append(
            self._graph.add(
                f"send {name}".strip(),
                *home.holds(share.channel, *home.lanes(share.channel, down=True)),
                writes=[Range.of(room)],
                action=lambda: home.write(room, data()),
                transfer=home.transfer(share.channel, room, down=True),
            )
        )

    def _fetch(self, name: str, shares: Sequence[Share]) -> None:
        home, results, order = self._home, self._results, count()
        for share in shares:
            array = _key(share.block).result
            if array not in share.rooms:
                continue
            for start, stop, extents in results.runs(share.block, alone_from=home.alone_from):
                room = self._room(share, array, start, stop)
                if not room.size:
                    continue
                whole = results.is_whole(start, stop, extents)
                # A result is stored, and freed, when all channels have sent their part of it.
                priority = home.fetch_priority if home.overlaps else next(order)
                read = partial(self._read, share, array, extents)
                self._graph.add(
                    f"fetch {array} {name}",
                    *home.holds(share.channel, *home.lanes(share.channel, down=False)),
                    reads=[Range.of(room)],
                    after=(*home.looked, *(() if home.overlaps else self._ran)),
                    action=partial(home.fetch, read, share, start, stop, whole=whole),
                    priority=priority,
                    transfer=home.transfer(share.channel, room, down=False),
                )

    def _read(
        self,
        share: Share,
        array: str,
        extents: Sequence[Extent],
        start: int,
        stop: int,
    ) -> Completion:
        """Begin to fetch elements [start, stop) of a segment into the results."""
        room, results = self._room(share, array, start, stop), self._results
        target = results.memory(start, stop, extents)
        if target is not None:
            done = partial(results.filled, start, stop, extents)
            return self._home.read(room[: stop - start], target, done)
        out = self._home.scratch(room.size, room.dtype)
        return self._home.read(
            room, out, partial(results.put, start, stop, extents, share.channel, out)
        )

    def _room(self, share: Share, array: str, start: int, stop: int) -> Buffer:
        """A channel's elements [start, stop) of an array; whole lines where transfers overlap."""
        segment = share.block.launch.segment
        end = padded(stop, segment.line) if self._home.overlaps else stop
        low, high = segment.stripes.span(start, end, share.channel)
        room = share.rooms[array]
        return room[low - share.first : min(high - share.first, room.size)]

    def _listed(self, share: Share) -> PairList | None:
        return self._lists.get((share.block.launch, share.block.start, share.channel))

    def _gradient(self, share: Share) -> Buffer | Pairs:
        listed = self._listed(share)
        if listed is not None:
            return listed.pairs
        return share.parts[gradient_array(_key(share.block).gradient_format)]

    def execute(
        self, numbers: Sequence[int], turns: Callable[[int], Iterable[Iterator[None]]]
    ) -> None:
        """Run the operations of the graph, and those of pieces of these numbers, which are added as
        the home has room for them.

        Raises
        ------
        Exception : that of the operation which failed first, with a note of what became of the
            others.
        """
        graph, home = self._graph, self._home
        execution = Execution(graph, self._clock)

        def add(number: int) -> Sequence[Operation]:
            begun = len(graph)
            self._take_turns(turns(number))
            return graph[begun:]

        ahead = len(numbers) if home.ahead is None else home.ahead
        added = [add(each) for each in numbers[:ahead]]
        while self._late:
            self._late.pop(next(iter(self._late)))()
        home.begin()
        try:
            with execution.growing():
                execution.admit()
                for number in numbers[ahead:]:
                    added.append(add(number))
                    execution.admit()
                    execution.wait(added.pop(0))
                execution.finish()
        except WorkError as failed:
            _, cause = next(iter(failed.failed.items()))
            cause.add_note(str(failed))
            raise cause from None
        self._graph, self._sent, self._ran = Graph(), [], []
        if self._device.cycles is not None:
            timeline = execution.timeline
            self._timelines.append(timeline)
            cycles = kernel_cycles(timeline, self._device.channel_count)
            self._traffic.cycles = (self._traffic.cycles or 0) + cycles
            self._traffic.step_cycles = (self._traffic.step_cycles or 0) + timeline.makespan

    def count(self, begun: Iterable[AcceleratedRuns]) -> None:
        """Count the cycles of runs on a device whose kernels count them, and which has no clock."""
        if self._device.cycles is not None:
            return
        sums: Counter[int] = Counter()
        for run in (cast(KernelRun, run) for each in begun for run in each.runs):
            if run.cycles is not None:
                sums[run.channel] += run.cycles
        if sums:
            self._traffic.cycles = (self._traffic.cycles or 0) + max(sums.values())


class RunParts(NamedTuple):
    """Runs of a rule on one channel.

    Attributes
    ----------
    reads, writes : memory that the runs use.
    starts : each starts one run.
    """

    reads: Sequence[Buffer]
    writes: Sequence[Buffer]
    starts: Sequence[Callable[[], Run]]


def run_parts(
    part: Arenas,
    key: RunKey,
    start: Start,
    factor: float,
    numbering: Numbering,
    gradient: Buffer | Pairs | None = None,
) -> RunParts:
    """Runs on the arrays of one channel.

    Parameters
    ----------
    gradient : None: the array of its format.
    """
    if gradient is None:
        gradient = part[gradient_array(key.gradient_format)]
    pairs = isinstance(gradient, Pairs)
    reads = [gradient.index, gradient.value] if isinstance(gradient, Pairs) else [gradient]
    writes = [each for each in part.values() if pairs or each is not gradient]
    begin = start({**part, "g": gradient}, key, factor, numbering)
    return RunParts(reads, writes, [begin] * key.times)


def kernel_cycles(timeline: Timeline, channels: int) -> int:
    """Cycles in which the kernel has the channel that it has longest."""
    lanes = timeline.lanes
    return max(
        sum(e.duration for e in lanes.get(lane(channel), ()) if BUS not in e.operation.holds)
        for channel in range(channels)
    )


def _key(block: Block) -> RunKey:
    return cast(RunKey, block.launch.key)


class StepExecutor:
    """Makes the steps of one optimizer, whose parameters have been prepared.

    Attributes
    ----------
    pair_spaces : room for compressed gradients.
    timeline : of the last step; None before the first, and on a device without a clock.
    launches : runs of the last step; none if it was skipped, or failed.
    """

    def __init__(
        self,
        device: KernelDevice,
        placement: Placement,
        settings: Settings,
        traffic: Traffic,
        home: DeviceHome,
    ) -> None:
        self.pair_spaces: dict[Segment, PairSpace] = {}
        self.timeline: Timeline | None = None
        self.launches: Sequence[Launch] = ()
        self.home = home
        self._device = device
        self._placement = placement
        self._settings = settings
        self._traffic = traffic

    def sends(self) -> Sends:
        """Where the arrays of a step are added."""
        return Sends(at_once=self.home.at_once)

    def make(self, step: StepInputs) -> Results | None:
        """Make a step: send all arrays, scan the gradients if that is wanted, and run the rules.

        Returns
        -------
        Results | None : None if the step is to be skipped: nothing has been updated.

        Raises
        ------
        GradientError : there is a bound, and the norm is not finite: nothing has been updated.
        DeviceError : no run goes on.
        StorageError, ChangedParameterError : of homes on drives.
        """
        step.sends.sort()
        self.launches = ()
        items, home, settings = step.items, self.home, self._settings
        launches = self._launches(items)
        compresses, looks = settings.compression is not None, self._looks(step.scaling)
        # A norm is summed in the order of the pairs, which pieces would change.
        work = home.pieces(launches, whole=compresses and looks)
        lists = self._lists(work, items) if compresses else {}
        targets = {
            extent: item.resident.target(direct=home.direct, fingerprints=home.fingerprints)
            for extent, item in items.items()
            if item.resident.is_fetched
        }
        results = Results(targets)
        graph = StepGraph(self, step, lists, results)
        try:
            with self._device.reserved():
                factor = self._factor(graph.scan(launches) if looks else (), step.scaling)
                if factor is None:
                    return None
                turns = graph.updates(work, factor)
                graph.execute(range(max(map(len, work), default=0)), turns)
        finally:
            self.timeline = graph.timeline
            home.close()
        step.sends.sent()
        graph.count(step.begun)
        self._traffic.launches += sum(len(each.runs) for each in step.begun)
        self.launches = launches
        return results

    def _launches(self, items: Mapping[Extent, StepItem]) -> list[Launch]:
        """Items as runs."""
        keyed = ((extent, item.key) for extent, item in items.items())
        return list(self._placement.launches(keyed))

    def _lists(self, work: Work, items: Mapping[Extent, StepItem]) -> Lists:
        """Compressed gradients of each run, counted as sent."""
        cuts: dict[Launch, list[list[range]]] = {}
        for channel, own in enumerate(work):
            for block in (each for piece in own for each in piece):
                ranges = cuts.setdefault(block.launch, [[] for _ in work])
                ranges[channel].append(range(block.start, block.stop))
        lists: dict[tuple[Launch, int, int], PairList] = {}
        for launch, ranges in cuts.items():
            compressed = {e: cast(Compressed, items[e].compressed) for e in launch.extents}
            for each in self.pair_spaces[launch.segment].lists(launch, compressed, ranges):
                lists[launch, each.cut.start, each.channel] = each
                self._traffic.gradients_down += each.pairs.index.nbytes + each.pairs.value.nbytes
                self._traffic.pairs += each.pairs.size
        return lists

    def _looks(self, scaling: Scaling) -> bool:
        """Whether gradients are looked at before the first update."""
        return self._settings.max_grad_norm is not None or scaling.found is not None

    def _factor(self, scans: Iterable[ScanRun], scaling: Scaling) -> float | None:
        """The factor that undoes the scale and bounds the norm; None if the step is to be skipped.

        Parameters
        ----------
        scans : that have ended: in the order of the launches, those of one in that of the channels.
            In this order their sums are added.

        Raises
        ------
        GradientError
        """
        not_finite, squares = False, 0.0
        for run in scans:
            not_finite |= run.found_inf
            squares += run.sum_of_squares
        if not_finite and scaling.found is not None:
            scaling.found.fill_(1.0)
            return None
        bound = self._settings.max_grad_norm
        norm = gradient_norm(squares, scaling.scale)
        if bound is not None and not math.isfinite(norm):
            raise GradientError("all parameters together", "of a finite norm", norm)
        return gradient_factor(norm, bound, scaling.scale)


def gradient_norm(sum_of_squares: float, scale: float = 1.0) -> float:
    """2-norm of gradients that were multiplied by `scale` before their squares were summed."""
    return math.sqrt(sum_of_squares) / scale


def gradient_factor(norm: float, max_norm: float | None, scale: float = 1.0) -> float:
    """What takes `scale` from the gradients, and bounds their norm.

    It is computed in binary64: min(1, max_norm / (norm + 1e-6)) / scale. The register of the kernel
    rounds it to binary32, once.

    Parameters
    ----------
    norm : of the gradients without the scale; not looked at without a bound.
    max_norm : the bound; None is no bound.
    """
    clip = 1.0 if max_norm is None else min(1.0, max_norm / (norm + EPSILON))
    return clip / scale
