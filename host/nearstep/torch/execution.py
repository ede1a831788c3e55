"""Execution of steps: the graph of each step runs on the device."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import cast

from nearstep.placement import Extent, Launch, Placement, Segment
from nearstep.run import Run
from nearstep.torch.clipping import clip_coefficient, gradient_norm
from nearstep.torch.compression import Compressed
from nearstep.torch.errors import GradientError
from nearstep.torch.exchange import Results, Sends
from nearstep.torch.homes.home import BUS, DeviceHome, lane
from nearstep.torch.operations import Lists, Pieces, StepOperations
from nearstep.torch.pair_space import PairList, PairSpace
from nearstep.torch.settings import Settings
from nearstep.torch.step import Scaling, StepItem, StepPlan
from nearstep.torch.traffic import Traffic
from nearstep.updater.accelerated import AcceleratedRuns
from nearstep.updater.device import KernelDevice
from nearstep.updater.run import KernelRun, ScanRun
from nearstep.work.clock import Clock
from nearstep.work.errors import WorkError
from nearstep.work.executor import Execution
from nearstep.work.operation import Operation
from nearstep.work.timeline import Timeline


class StepExecutor:
    """Executes the steps of one optimizer, whose parameters have been prepared.

    Attributes
    ----------
    pair_spaces : memory for compressed gradients.
    timelines : of the graphs of the last step, in order; none on a device without a clock.
    launches : of the last `make`; none if the step was skipped, or failed.
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
        self.timelines: list[Timeline] = []
        self.clear()
        self.launches: Sequence[Launch] = ()
        self.home = home
        self._device = device
        self._placement = placement
        self._settings = settings
        self._traffic = traffic
        self._working = 0
        self._begun = 0.0

    def clear(self) -> None:
        """Begin a step: forget the timelines of the last one, and its clock."""
        self.timelines.clear()
        self._taken = 0
        self._clock: Clock | None = None

    def take_timelines(self) -> Sequence[Timeline]:
        """Return the timelines of the graphs since the last call."""
        first, self._taken = self._taken, len(self.timelines)
        return self.timelines[first:]

    def make(self, plan: StepPlan, sends: Sends, begun: list[AcceleratedRuns]) -> Results | None:
        """Make a step: send all arrays, scan the gradients if necessary, and run the rules.

        Parameters
        ----------
        plan : its items are ready.
        begun : runs of the rules are appended.

        Returns
        -------
        Results | None : None if the step is to be skipped: nothing has been updated.

        Raises
        ------
        GradientError : there is a bound, and the norm is not finite: nothing has been updated.
        DeviceError : no run continues.
        StorageError, ChangedParameterError : of homes on drives.
        """
        sends.sort()
        self.launches = ()
        items = {item.resident.extent: item for item in plan.items}
        home, settings, scaling = self.home, self._settings, plan.scaling
        launches = list(self._placement.launches((each, items[each].key) for each in items))
        compresses = settings.compression is not None
        looks = settings.max_grad_norm is not None or scaling.found is not None
        results = Results(
            {
                extent: item.resident.target(direct=home.direct, fingerprints=home.fingerprints)
                for extent, item in items.items()
                if plan.fetches and item.resident.is_fetched
            }
        )
        sends_later = not looks and (compresses or not sends.is_empty)
        # A norm is summed in the order of the pairs, which pieces would change.
        work = home.pieces(
            launches, whole=compresses and looks, transfers=sends_later or not results.is_empty
        )
        lists = self._lists(work, items) if compresses else {}
        operations = StepOperations(self._device, home, settings, plan, sends, lists, results)
        try:
            with self._device.reserved():
                scans = self._scan(operations, launches) if looks else ()
                factor = self._clip_coefficient(scans, scaling)
                if factor is None:
                    return None
                begin = partial(self.begin, begun)
                add = partial(operations.update, work=work, factor=factor, begin=begin)
                self.execute(operations, begun, range(max(map(len, work), default=0)), add)
        finally:
            home.close()
        sends.sent()
        self._count(begun)
        self._traffic.launches += sum(len(each.runs) for each in begun)
        self.launches = launches
        return results

    def execute(
        self,
        operations: StepOperations,
        begun: Sequence[AcceleratedRuns],
        numbers: Sequence[int] = (),
        add: Callable[[int], Sequence[Operation]] = lambda _: (),
    ) -> None:
        """Run the operations of the graph, and those of pieces of these numbers, which are added
        when the home has room for them.

        Parameters
        ----------
        begun : runs are appended.

        Raises
        ------
        Exception : that of the operation which failed first, with a note about the others.
        """
        home = self.home
        self._clock = self._clock or home.clock()
        execution = Execution(operations.graph, self._clock, begun)
        ahead = len(numbers) if home.ahead is None else home.ahead
        added = [add(each) for each in numbers[:ahead]]
        operations.fetch_late()
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
        operations.executed()
        if self._device.cycles is not None:
            timeline = execution.timeline
            self.timelines.append(timeline)
            self._count_cycles(kernel_cycles(timeline, self._device.channel_count))
            self._traffic.step_cycles = (self._traffic.step_cycles or 0) + timeline.makespan

    def begin(
        self,
        begun: list[AcceleratedRuns],
        channel: int,
        starts: Sequence[Callable[[], Run]],
    ) -> Callable[[], AcceleratedRuns]:
        """Return the start of some runs on a channel, one after the other, in acceleration mode;
        the runs are appended to `begun`, where an interrupt finds them."""
        mode, bound = self._device.acceleration(channel), self._settings.max_cycles
        begun.append(AcceleratedRuns(starts, self._timed(), mode, max_cycles=bound))
        return begun[-1].start

    @contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time in which at least one channel works."""
        if not self._working:
            self._begun = time.perf_counter()
        self._working += 1
        try:
            yield
        finally:
            self._working -= 1
            if not self._working:
                self._traffic.run_seconds += time.perf_counter() - self._begun

    def _scan(self, operations: StepOperations, launches: Sequence[Launch]) -> Sequence[ScanRun]:
        """Send all arrays, and scan all gradients.

        Returns
        -------
        Sequence[ScanRun] : by launch, then by channel.
        """
        begun: list[AcceleratedRuns] = []
        numbers = operations.scan(launches, partial(self.begin, begun))
        self.execute(operations, begun)
        operations.scanned()
        runs = [cast(ScanRun, run) for each in begun for run in each.runs]
        left = {channel: iter(own) for channel, own in numbers.items()}
        found = {(next(left[run.channel]), run.channel): run for run in runs}
        self._traffic.scans += len(found)
        self._count(begun)
        return [found[each] for each in sorted(found)]

    def _count(self, begun: Iterable[AcceleratedRuns]) -> None:
        """Count the cycles of runs on a device whose kernels count them, and which has no clock."""
        if self._device.cycles is not None:
            return
        sums: Counter[int] = Counter()
        for run in (cast(KernelRun, run) for each in begun for run in each.runs):
            if run.cycles is not None:
                sums[run.channel] += run.cycles
        if sums:
            self._count_cycles(max(sums.values()))

    def _count_cycles(self, cycles: int) -> None:
        self._traffic.cycles = (self._traffic.cycles or 0) + cycles

    def _lists(self, work: Pieces, items: Mapping[Extent, StepItem]) -> Lists:
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

    def _clip_coefficient(self, scans: Iterable[ScanRun], scaling: Scaling) -> float | None:
        """Return the factor that undoes the scale and bounds the norm; None if the step is to be
        skipped.

        Parameters
        ----------
        scans : ended scans, whose sums are added in this order.

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
        return clip_coefficient(norm, bound, scaling.scale)


def kernel_cycles(timeline: Timeline, channels: int) -> int:
    """Cycles in which the kernel has the channel that it has longest."""
    lanes = timeline.lanes
    return max(
        sum(e.duration for e in lanes.get(lane(channel), ()) if BUS not in e.operation.holds)
        for channel in range(channels)
    )
