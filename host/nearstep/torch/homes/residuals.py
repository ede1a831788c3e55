"""What error feedback holds back of compressed gradients, on the drives that have the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from nearstep.backends.base import Completion
from nearstep.placement import Extent
from nearstep.storage.aligned import AlignedPool
from nearstep.torch import convert
from nearstep.torch.homes.segments import HELD_BACK, DriveSegment, StoredArray
from nearstep.torch.parameter import DeviceParameter
from nearstep.torch.state import ParameterState

WRITTEN_ELEMENTS = 1 << 18
"""That are written to a drive at once."""

WRITES = 2
"""That are under way while the next is made."""


def write_residuals(
    segments: Iterable[DriveSegment], states: Mapping[Tensor, Any], *, save: bool
) -> list[ParameterState]:
    """Write the residuals that the drives do not have as they are: the next generation has them.

    Parameters
    ----------
    states : `Optimizer.state`.
    save : False removes them from the drives instead.

    Returns
    -------
    list[ParameterState] : states whose residual was written.
    """
    written = []
    for segment in segments:
        is_held = False
        unsaved: list[tuple[Extent, Tensor]] = []
        for resident in segment.parameters:
            state = states.get(resident.parameter)
            if not save or not isinstance(state, ParameterState) or state.residual is None:
                continue
            is_held = True
            if (residual := state.unsaved_residual) is not None:
                unsaved.append((resident.extent, residual))
                written.append(state)
        if is_held:
            segment.reserve({HELD_BACK: 0.0})
            if unsaved:
                _write(segment, unsaved)
        elif HELD_BACK in segment.on_drives:
            segment.remove(HELD_BACK)
    return written


def read_residual(resident: DeviceParameter, state: ParameterState) -> None:
    """Have the residual of a parameter as the drives have it."""
    array = resident.extent.read(HELD_BACK)
    state.keep_residual(convert.to_tensor(array, resident.parameter))
    state.residual_saved()


class _Writer:
    """Writes an array in stretches of at most `most` elements that end at multiples of it, so that
    what drives write whole is whole: they read first what is written in part."""

    def __init__(self, place: StoredArray, most: int) -> None:
        self._place = place
        self._most = most
        self._pool = AlignedPool()
        self._room = self._pool.empty(most, np.float32)
        self._writes: list[tuple[list[Completion], object]] = []
        self._start = self._stop = 0  # elements that are in the room

    def add(self, start: int, data: NDArray[np.float32]) -> None:
        """Write `data` to elements from `start` on, behind all that were added before."""
        if start != self._stop:
            self.flush()
            self._start = self._stop = start
        for part in np.split(data, range(-start % self._most, data.size, self._most)):
            self._room[self._stop - self._start :][: part.size] = part
            self._stop += part.size
            if self._stop % self._most == 0:
                self.flush()

    def flush(self) -> None:
        """Begin to write what is in the room."""
        if self._stop > self._start:
            data = self._room[: self._stop - self._start]
            self._writes.append((self._place.begin_write(self._start, data), data))
            self.wait(WRITES)
            self._room = self._pool.empty(self._most, np.float32)
        self._start = self._stop

    def wait(self, most: int) -> None:
        """Wait until at most so many writes are under way."""
        while len(self._writes) > most:
            completions, _ = self._writes.pop(0)
            for each in completions:
                each.wait()


def _write(segment: DriveSegment, residuals: Iterable[tuple[Extent, Tensor]]) -> None:
    """Write residuals, in the order of their extents; what is between neighbours becomes zero."""
    place = segment.elsewhere(HELD_BACK)
    assert place is not None, "it is on the drives alone"
    writer = _Writer(place, WRITTEN_ELEMENTS * segment.stripes.channels)
    stop = end = -1
    for extent, residual in residuals:
        if extent.start == end:
            writer.add(stop, np.zeros(end - stop, np.float32))
        writer.add(extent.start, convert.to_float32(residual))
        stop, end = extent.start + extent.count, extent.end
    writer.flush()
    writer.wait(0)
