"""Arrays of parameters as a generation on drives has them, wherever these are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nearstep.storage.generation import GenerationView
from nearstep.stripes import Stripes
from nearstep.torch.homes.errors import ResumeError
from nearstep.torch.parameter import DeviceParameter

CARRIED_ELEMENTS = 1 << 20
"""Elements that are copied at once."""


class SavedArrays(ABC):
    """Arrays of parameters of one generation."""

    def __init__(self, view: GenerationView) -> None:
        self._view = view

    @abstractmethod
    def has(self, key: str, array: str) -> bool:
        """Whether there is this array of the parameter of this name."""

    @abstractmethod
    def read(self, key: str, array: str, start: int, out: NDArray[Any]) -> None:
        """Copy elements of a parameter's array from `start` on to `out`, of shape (n,).

        Raises
        ------
        StorageError
        """


class StripedArrays(SavedArrays):
    """Of each parameter a tensor, striped over the drives of the host."""

    def has(self, key: str, array: str) -> bool:
        return f"{key}.{array}" in self._view.tensors

    def read(self, key: str, array: str, start: int, out: NDArray[Any]) -> None:
        self._view.read(f"{key}.{array}", out, start * out.itemsize)


class ShardedArrays(SavedArrays):
    """Of each flat array a tensor on the drive of each card.

    Parameters
    ----------
    layout : as of `nearstep.torch.homes.peer.PeerHome.layout`.
    """

    def __init__(self, view: GenerationView, layout: Mapping[str, Any]) -> None:
        super().__init__(view)
        self._stripes = Stripes(layout["block"], layout["cards"])
        self._places = {
            key: (number, start)
            for number, segment in enumerate(layout["segments"])
            for key, (start, _) in segment.items()
        }

    def has(self, key: str, array: str) -> bool:
        if key not in self._places:
            return False
        return f"{self._places[key][0]}.{array}@0" in self._view.tensors

    def read(self, key: str, array: str, start: int, out: NDArray[Any]) -> None:
        number, at = self._places[key]
        low = at + start
        for channel in range(self._stripes.channels):
            first, last = self._stripes.span(low, low + out.size, channel)
            if first < last:
                part = np.empty(last - first, out.dtype)
                self._view.read(f"{number}.{array}@{channel}", part, first * out.itemsize)
                self._stripes.scatter(part, out, low, channel)


def saved_arrays(view: GenerationView) -> SavedArrays:
    """What a generation has."""
    layout = view.meta.get("layout")
    return StripedArrays(view) if layout is None else ShardedArrays(view, layout)


def reshard(saved: SavedArrays, key: str, resident: DeviceParameter, arrays: Iterable[str]) -> None:
    """Copy arrays of one parameter to the drives that it has now, which have room for them.

    Raises
    ------
    ResumeError : there is none.
    StorageError
    """
    extent = resident.extent
    for array in arrays:
        if not saved.has(key, array):
            raise ResumeError(f"{array} of {resident.label}", "none")
        target = extent.segment.elsewhere(array)
        assert target is not None, "nothing is in memory before the first step"
        for start in range(0, extent.count, CARRIED_ELEMENTS):
            count = min(CARRIED_ELEMENTS, extent.count - start)
            part = np.empty(count, extent.segment.dtype_of(array))
            saved.read(key, array, start, part)
            target.write(extent.start + start, part)
