"""Where the updated parameters of subgroups land on the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.placement import Extent, Launch
from nearstep.torch import convert
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.step import Update
from nearstep.torch.transfers import Inbox, Wanted


class Landing:
    """Memory that an array lands in, piece by piece.

    Parameters
    ----------
    words : of shape (elements,).
    sums : whether it is a parameter's, which keeps a fingerprint.
    """

    def __init__(self, words: NDArray[Any], *, sums: bool) -> None:
        self.words = words
        self._has_sums = sums
        self._sums = convert.PartSums(words)
        size, step = words.size, convert.SUMMED
        self._missing = [min(step, size - at) for at in range(0, size, step)]

    def landed(self, start: int, stop: int) -> None:
        """Elements [start, stop) are there, for good: parts that are whole are summed, so that
        nobody waits for that at the end."""
        if not self._has_sums:
            return
        step = convert.SUMMED
        for number in range(start // step, -(-stop // step)):
            low, high = max(start, number * step), min(stop, (number + 1) * step)
            self._missing[number] -= high - low
            if not self._missing[number]:
                self._sums.make(number)

    @property
    def fingerprint(self) -> int | None:
        """`convert.fingerprint` of the array; None if that is not known."""
        return None if any(self._missing) or not self._has_sums else self._sums.fingerprint


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
        self._targets = {extent: _landing(each) for extent, each in updates.items()}
        self._shares: Counter[tuple[Launch, int]] = Counter()

    def whole(self, launch: Launch, start: int, stop: int) -> NDArray[Any] | None:
        """Where elements [start, stop) of a launch's segment go as they are.

        One parameter has them, on one card; None if they have to be put to their places. When they
        are there, `landed` is to be called.
        """
        if launch.segment.stripes.channels > 1:
            return None
        for extent in launch.extents:
            if extent.start <= start and stop <= extent.start + extent.count:
                return self._targets[extent].words[start - extent.start : stop - extent.start]
        return None

    def landed(self, launch: Launch, start: int, stop: int) -> None:
        """Elements [start, stop) of a launch's segment are where they go."""
        for extent in launch.extents:
            low, high = max(start, extent.start), min(stop, extent.start + extent.count)
            if low < high:
                self._targets[extent].landed(low - extent.start, high - extent.start)

    def land(self, launch: Launch, start: int, stop: int, channel: int, part: NDArray[Any]) -> None:
        """Take a card's share of elements [start, stop) of a launch's segment."""
        stripes = launch.segment.stripes
        first, _ = stripes.span(start, stop, channel)
        for extent in launch.extents:
            low, high = max(start, extent.start), min(stop, extent.start + extent.count)
            if low < high:
                at, end = stripes.span(low, high, channel)
                words = self._targets[extent].words
                out = words[low - extent.start : high - extent.start]
                if stripes.channels == 1:
                    out[:] = part[at - first : end - first]
                else:
                    stripes.scatter(part[at - first : end - first], out, low, channel)
        self._shares[launch, start] += part.size
        if self._shares[launch, start] == stop - start:
            self.landed(launch, start, stop)

    def take(self, wanted: Wanted, out: NDArray[Any] | None = None) -> NDArray[Any]:
        found = self._targets[wanted.extent].words
        if out is None or out.ctypes.data == found.ctypes.data:
            return found
        out[:] = found
        return out

    def fingerprint(self, wanted: Wanted) -> int | None:
        return self._targets[wanted.extent].fingerprint


def _landing(update: Update) -> Landing:
    resident, extent = update.resident, update.resident.extent
    array = resident.wanted.array
    if isinstance(resident, DeviceParameter) and not resident.is_small and array == "p":
        found = convert.landing(resident.parameter)
        if found is not None:
            return Landing(found, sums=True)
    return Landing(np.empty(extent.count, extent.segment.dtype_of(array)), sums=False)
