"""Where the updated parameters of subgroups land on the host."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.placement import Extent, Launch
from nearstep.torch import convert
from nearstep.torch.resident import Resident
from nearstep.torch.step import Update
from nearstep.torch.transfers import Inbox, Wanted


class PieceInbox(Inbox):
    """What subgroups leave goes to the parameters as each ends: the host needs no memory for all.

    Small parameters, and those of another format or layout, have arrays of their own until they are
    taken.

    Parameters
    ----------
    updates : of the step.
    """

    def __init__(self, updates: Mapping[Extent, Update]) -> None:
        super().__init__(())
        self._targets = {extent: _target(each) for extent, each in updates.items()}

    def whole(self, launch: Launch, start: int, stop: int) -> NDArray[Any] | None:
        """Where elements [start, stop) of a launch's segment go as they are: one parameter has
        them, on one card; None if they have to be put to their places."""
        if launch.segment.stripes.channels > 1:
            return None
        for extent in launch.extents:
            if extent.start <= start and stop <= extent.start + extent.count:
                return self._targets[extent][start - extent.start : stop - extent.start]
        return None

    def land(self, launch: Launch, start: int, stop: int, channel: int, part: NDArray[Any]) -> None:
        """Take a card's share of elements [start, stop) of a launch's segment."""
        stripes = launch.segment.stripes
        first, _ = stripes.span(start, stop, channel)
        for extent in launch.extents:
            low, high = max(start, extent.start), min(stop, extent.start + extent.count)
            if low < high:
                at, end = stripes.span(low, high, channel)
                out = self._targets[extent][low - extent.start : high - extent.start]
                if stripes.channels == 1:
                    out[:] = part[at - first : end - first]
                else:
                    stripes.scatter(part[at - first : end - first], out, low, channel)

    def take(self, wanted: Wanted, out: NDArray[Any] | None = None) -> NDArray[Any]:
        found = self._targets[wanted.extent]
        if out is None or out.ctypes.data == found.ctypes.data:
            return found
        out[:] = found
        return out


def _target(update: Update) -> NDArray[Any]:
    resident, extent = update.resident, update.resident.extent
    array = resident.wanted.array
    if isinstance(resident, Resident) and not resident.is_small and array == "p":
        found = convert.landing(resident.parameter)
        if found is not None:
            return found
    return np.empty(extent.count, extent.segment.dtype_of(array))
