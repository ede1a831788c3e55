"""State of an optimizer on the drives of cards."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import numpy as np
from torch import Tensor

from nearstep.placement import padded
from nearstep.smartssd.device import SmartssdDevice
from nearstep.torch.cards.host_changes import Expected, HostChangeChecks
from nearstep.torch.cards.parameter import CardParameter
from nearstep.torch.cards.prefetcher import Prefetcher
from nearstep.torch.cards.segment import CardSegment, is_state
from nearstep.torch.overflow.drive_tier import DriveTier
from nearstep.torch.overflow.held_store import HeldStore
from nearstep.torch.overflow.undo import Undo
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.traffic import Traffic


class CardTier(DriveTier[CardSegment]):
    """All state of one optimizer on the drives of cards.

    Parameters
    ----------
    drives : one for each card.
    device
    traffic
    ahead : reads from the drives.
    looks : at the host's parameters.
    """

    resident = CardParameter
    recovers = True

    def __init__(
        self,
        drives: HeldStore,
        device: SmartssdDevice,
        traffic: Traffic,
        ahead: Prefetcher,
        looks: HostChangeChecks,
    ) -> None:
        super().__init__(drives)
        self._device = device
        self._traffic = traffic
        self._ahead = ahead
        self._looks = looks

    @property
    def peak(self) -> int:
        return self._device.capacity_bytes - self._device.free_bytes

    def layout(self, names: Mapping[Tensor, str]) -> Mapping[str, Any]:
        """Cards, elements of a block, and of each segment the parameters, by name: first element
        and elements."""
        blocks = {segment.stripes.block for segment in self.segments}
        return {
            "cards": self._device.channel_count,
            "block": max(blocks, default=1),
            "segments": [
                {
                    names[each.parameter]: [each.extent.start, each.extent.count]
                    for each in segment.residents
                }
                for segment in self.segments
            ],
        }

    def units(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        return [list(parameters)]

    def segment(
        self, counts: Sequence[int], line: int, dtypes: Mapping[str, np.dtype], keys: Sequence[str]
    ) -> CardSegment:
        size = sum(padded(count, line) for count in counts)
        number = len(self.segments)
        return CardSegment(self._device, size, line, dtypes, number, self.drives, self._traffic)

    def check_room(self, segment: CardSegment, arrays: Sequence[str], label: str) -> None:
        """Subgroups are as large as the memory of a card allows, whatever the parameters are."""

    def begin(self) -> None:
        """Nothing is in memory before the first step."""

    def prepare(self, residents: Iterable[DeviceParameter], *, anew: bool = False) -> None:
        self._ahead.use(self.store)
        beside = self._looks.beside and not anew and self._device.cycles is None
        if not self.is_dirty:  # else a generation comes first, and what was read counts no more
            self._ahead.begin()
        later: list[tuple[CardParameter, Expected]] = []
        for resident in map(_of_card, residents):
            expected = resident.begin_look() if beside and not self.is_dirty else None
            if expected is None:
                resident.settle_on_drives()
            else:
                later.append((resident, expected))
        if self.is_dirty:
            for resident, _ in later:
                resident.settle_on_drives()
            later = []
        self._looks.begin([expected for _, expected in later])
        self._looks.beside = not self.is_dirty

    def keep(self, undo: Undo, residents: Iterable[DeviceParameter]) -> None:
        """The drives have the parameters as they are."""

    def restore(self, residents: Iterable[DeviceParameter]) -> None:
        if not self._looks.passed:
            return  # the host has them as they were, and perhaps not as the drives have them
        for each in residents:
            _of_card(each).read_again()

    def bring(self, segment: CardSegment, arrays: Mapping[str, float]) -> None:
        segment.reserve({k: v for k, v in arrays.items() if is_state(k)})

    def prefetch(self, segment: CardSegment, arrays: Mapping[str, float]) -> None:
        """Subgroups are read ahead by the transfer handler."""

    def write_masters(self) -> None:
        for segment in self.segments:
            for resident in segment.residents:
                _of_card(resident).settle_on_drives()

    def commit(self, meta: Mapping[str, object]) -> None:
        for segment in self.segments:
            self.forget_gradients(segment)
        super().commit(meta)
        self._ahead.use(self.store)  # another one, if the commit was in doubt

    def forget(self) -> None:
        """Nothing stays in the memory of a card."""
        self._looks.cancel()
        self._ahead.cancel()


def _of_card(resident: DeviceParameter) -> CardParameter:
    return cast(CardParameter, resident)
