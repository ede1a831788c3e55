"""Steps of optimizers whose state lies on the drives of cards."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

from nearstep.backends.peer import PeerBackend
from nearstep.placement import Extent, Launch, Placement
from nearstep.smartssd.device import SmartssdDevice
from nearstep.smartssd.peer import PeerToPeer
from nearstep.storage.store import Store
from nearstep.torch.cards.handler import Slots, Subgroup, TransferHandler, states_of, subgroups
from nearstep.torch.cards.host_changes import HostChangeChecks
from nearstep.torch.cards.landing import PieceInbox
from nearstep.torch.cards.prefetcher import Prefetcher
from nearstep.torch.cards.segment import segment_of
from nearstep.torch.launcher import Accelerator
from nearstep.torch.pairs import PairList
from nearstep.torch.settings import Settings
from nearstep.torch.staging import DeferredOutbox
from nearstep.torch.step import StepInputs, Steps, Update
from nearstep.torch.step_graph import Place, kernel_cycles
from nearstep.torch.traffic import Traffic
from nearstep.torch.transfers import Inbox, Outbox
from nearstep.work.clock import Clock
from nearstep.work.errors import WorkError
from nearstep.work.executor import Execution
from nearstep.work.operation import Operation
from nearstep.work.timeline import Timeline

MOST_HELD = 3
"""Subgroups in the memory of a card, if there is room: one comes, one is updated, one goes."""


class CardSteps(Steps):
    """Subgroup after subgroup is brought to the cards, updated, and written back.

    Parameters
    ----------
    device, placement, settings, traffic : as of `Steps`.
    store : a drive for each card.
    naive : a subgroup is read when the one before has been written (figure 5a).

    Attributes
    ----------
    ahead : reads from the drives.
    looks : at the host's parameters.
    """

    def __init__(
        self,
        device: SmartssdDevice,
        placement: Placement,
        settings: Settings,
        traffic: Traffic,
        store: Store,
        *,
        naive: bool = False,
    ) -> None:
        super().__init__(device, placement, settings, traffic)
        self._naive = naive
        self._peer = PeerToPeer(device.backend, store)
        self.ahead = Prefetcher(self._peer, traffic)
        self.looks = HostChangeChecks()
        held = min(MOST_HELD, device.card.memory_bytes // device.card.subgroup_bytes)
        self._slots = Slots(device, device.card.subgroup, 1 if naive else held)
        weakref.finalize(self, self._slots.free)

    @property
    def cut(self) -> int:
        return self._slots.elements * self._device.channel_count

    def outbox(self) -> Outbox:
        return DeferredOutbox()

    def make(self, step: StepInputs) -> Inbox | None:
        updates, outbox = step.updates, step.outbox
        assert isinstance(outbox, DeferredOutbox)
        outbox.sort()
        factor = self._factor((), step.scaling)
        assert factor is not None, "only what looks at gradients skips a step"
        launches = self._launches(updates)
        found = list(subgroups(launches, lambda each: _states(each, updates), self.cut))
        accelerator = Accelerator(self._device, self._traffic, self._settings.max_cycles)
        handler = TransferHandler(
            self._device,
            self._peer,
            self.ahead,
            self._slots,
            self._traffic,
            accelerator,
            look=self.looks.take(),
            naive=self._naive,
        )
        lists = self._lists(found, updates) if self._settings.compression is not None else {}
        inbox = PieceInbox(updates)
        into = inbox if step.fetches else None

        def add(subgroup: Subgroup) -> Sequence[Operation]:
            return handler.add(subgroup, outbox, lists, step.start, factor, step.started, into)

        try:
            with self._device.reserved():
                timeline = self._execute(handler, found, add)
        finally:
            handler.close()
            self.ahead.cancel()
        outbox.sent()
        if self._device.cycles is not None:
            self.timeline = timeline
            channels = self._device.channel_count
            cycles = kernel_cycles(timeline, channels)
            self._traffic.cycles = (self._traffic.cycles or 0) + cycles
            self._traffic.step_cycles = (self._traffic.step_cycles or 0) + timeline.makespan
        self._traffic.launches += len(step.started)
        return inbox

    def _execute(
        self,
        handler: TransferHandler,
        found: Sequence[Subgroup],
        add: Callable[[Subgroup], Sequence[Operation]],
    ) -> Timeline:
        """Add subgroups and have them updated; without a clock each is added shortly before there
        is room for it, so that drives need not wait until all are."""
        backend = self._device.backend
        assert isinstance(backend, PeerBackend)
        clock = Clock([backend], backend.hertz) if self.clock is None else self.clock
        execution = Execution(handler.graph, clock)
        first = len(found) if self._device.cycles is not None else self._slots.count
        added = [add(each) for each in found[:first]]
        reads_ahead = self._device.cycles is None and not self._naive
        written = any(segment_of(each.launch.segment).dirty for each in found)
        self.ahead.discard_stale(handler.first if reads_ahead else (), written=written)
        try:
            with execution.growing():
                execution.admit()
                for each in found[first:]:
                    added.append(add(each))
                    execution.admit()
                    execution.wait(added.pop(0))
                execution.finish()
        except WorkError as failed:
            _, cause = next(iter(failed.failed.items()))
            cause.add_note(str(failed))
            raise cause from None
        return execution.timeline

    def _lists(
        self, found: Sequence[Subgroup], updates: Mapping[Extent, Update]
    ) -> dict[Place, PairList]:
        cuts: dict[Launch, list[range]] = {}
        for each in found:
            cuts.setdefault(each.launch, []).append(range(each.start, each.stop))
        every = range(self._device.channel_count)
        return {
            Place(launch, each.cut.start, each.channel): each
            for launch, ranges in cuts.items()
            for each in self._pair_lists(launch, updates, [ranges for _ in every])
        }


def _states(launch: Launch, updates: Mapping[Extent, Update]) -> Sequence[str]:
    return states_of(launch, updates[launch.extents[0]].arrays)
