"""Steps as graphs of work: transfers to one channel go on while the kernel of another runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from nearstep.placement import Extent, Launch, Placement
from nearstep.torch.pairs import PairList
from nearstep.torch.pieces import Work, pieces
from nearstep.torch.sequence import SequentialSteps
from nearstep.torch.settings import Settings
from nearstep.torch.staging import DeferredOutbox
from nearstep.torch.step import StepInputs, Steps, Update
from nearstep.torch.step_graph import Place, StepGraph
from nearstep.torch.traffic import Traffic
from nearstep.torch.transfers import Inbox, Outbox
from nearstep.updater.device import KernelDevice

FEWEST = 1 << 14
"""Elements of a step that is one piece; one of n times as many has the root of n as many pieces.

Nothing covers the first transfer, which is the shorter the more pieces there are. But each costs
two changes of mode and a start, some 1,000 cycles: on a DIMM of DDR4-1600 as much as a transfer of
some 8,000 elements."""


def steps_of(
    device: KernelDevice, placement: Placement, settings: Settings, traffic: Traffic
) -> Steps:
    """Graphs for a device with a clock; others gain nothing from them."""
    kind = SequentialSteps if device.cycles is None else GraphSteps
    return kind(device, placement, settings, traffic)


class GraphSteps(Steps):
    """For a device with a clock.

    On a device with several channels the launches of a step are cut into pieces. Of each the
    channels get their gradients, run, and give their parameters back in turn: while one has the
    host's bus, the kernels of the others run. On a device with one channel a step is one piece.
    """

    @property
    def cut(self) -> int | None:
        return self._rounded(1) if self._device.channel_count > 1 else None

    def outbox(self) -> Outbox:
        return DeferredOutbox()

    def make(self, step: StepInputs) -> Inbox | None:
        updates, outbox, started = step.updates, step.outbox, step.started
        assert isinstance(outbox, DeferredOutbox)
        outbox.sort()
        launches = self._launches(updates)
        compresses, looks = self._settings.compression is not None, self._looks(step.scaling)
        # A norm is summed in the order of the pairs, which pieces would change.
        work = self._pieces(launches, whole=compresses and looks)
        lists = self._lists(work, updates) if compresses else {}
        bound, clock = self._settings.max_cycles, self.clock
        graph = StepGraph(self._device, self._traffic, bound, outbox, lists, clock)
        try:
            with self._device.reserved():
                factor = self._factor(graph.scan(launches) if looks else (), step.scaling)
                if factor is None:
                    return None
                landing = graph.update(
                    work, step.start, factor, started, sent=looks, fetches=step.fetches
                )
        finally:
            self.timeline = graph.timeline
        self._traffic.launches += len(started)
        return landing

    def _pieces(self, launches: Sequence[Launch], *, whole: bool) -> Work:
        """What each channel does.

        The first piece is the smaller, the earlier a channel gets it: so they do not want the bus
        at the same time later.
        """
        size, channels = None, self._device.channel_count
        if self.cut is not None:
            total = sum(launch.count for launch in launches)
            size = max(self.cut, self._rounded(math.isqrt(total * FEWEST)))
        return [
            pieces(launches, size, (size or 0) * (channel + 1) // channels, whole=whole)
            for channel in range(channels)
        ]

    def _lists(self, work: Work, updates: Mapping[Extent, Update]) -> dict[Place, PairList]:
        cuts: dict[Launch, list[list[range]]] = {}
        for channel, own in enumerate(work):
            for cut in (each for piece in own for each in piece):
                ranges = cuts.setdefault(cut.launch, [[] for _ in work])
                ranges[channel].append(range(cut.start, cut.stop))
        return {
            Place(launch, each.cut.start, each.channel): each
            for launch, ranges in cuts.items()
            for each in self._pair_lists(launch, updates, ranges)
        }

    def _rounded(self, elements: int) -> int:
        """The next number of elements of which each channel has as many, in whole blocks."""
        turn = self._device.stripe_bytes // 4 * self._device.channel_count
        return -(-elements // turn) * turn
