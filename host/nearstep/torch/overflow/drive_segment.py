"""Segments whose arrays lie on drives."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Completion
from nearstep.device import Device
from nearstep.placement import Elsewhere, Segment, element
from nearstep.storage.store import Store
from nearstep.torch.overflow.held_store import HeldStore
from nearstep.torch.traffic import Traffic

if TYPE_CHECKING:
    from nearstep.torch.parameter import DeviceParameter

GRADIENTS = ("g", "g_fp16", "g_bf16")
"""Arrays that do not outlast a step, unless the device was told to keep gradients."""

HELD_BACK = "error-feedback"
"""Array of what compression has not sent so far. No state of a rule can be called so."""

FILLED_ELEMENTS = 1 << 20
"""Elements that are written at once where an array is filled."""


class OnDrive(NamedTuple):
    """A tensor of a store with elements of an array.

    Attributes
    ----------
    key : its name.
    elements
    drive : that all of it lies on; None if it is striped.
    """

    key: str
    elements: int
    drive: int | None


class Written(Elsewhere, Protocol):
    """An array on drives."""

    def begin_write(self, start: int, data: NDArray[Any]) -> list[Completion]:
        """The same as `write`; `data` must not change until that has ended."""


class DriveSegment(Segment):
    """Arrays that are reserved lie on drives.

    Parameters
    ----------
    device, size, line, dtypes : as of `Segment`.
    drives
    traffic : counters.

    Attributes
    ----------
    traffic
    on_drives : arrays that have tensors on the drives.
    residents : the parameters.
    dirty : arrays that were written, in memory or on drives, by no step.
    unit : index among the segments of an optimizer.
    in_step : gradients that are reserved do not outlast it.
    """

    def __init__(
        self,
        device: Device,
        size: int,
        line: int,
        dtypes: Mapping[str, np.dtype],
        drives: HeldStore,
        traffic: Traffic,
    ) -> None:
        super().__init__(device, size, line, MappingProxyType(dict(dtypes)))
        self._drives = drives
        self.traffic = traffic
        self.residents: list[DeviceParameter] = []
        self.dirty: set[str] = set()
        self.unit = -1
        self.in_step = False
        self.on_drives: set[str] = set()

    @property
    def store(self) -> Store:
        """The store, open. Raises `StorageError`."""
        return self._drives.store

    @abstractmethod
    def tensors(self, array: str) -> Iterator[OnDrive]:
        """Those that an array consists of."""

    @abstractmethod
    def elsewhere(self, array: str) -> Written | None:
        """Where an array is while it is not in the memory of the device."""

    @abstractmethod
    def find(self) -> None:
        """See which arrays the drives have."""

    def has(self, array: str) -> bool:
        """Whether an array is in memory."""
        return array in self._arenas[0]

    def written(self, array: str) -> None:
        if array not in GRADIENTS or array in self.on_drives:
            self.changed(array)

    def changed(self, array: str) -> None:
        """An array is no more what the last generation on the drives has."""
        self.dirty.add(array)

    def count_write(self, array: str, nbytes: int) -> None:
        """The host writes so many bytes of an array to the drives."""
        if array == HELD_BACK:
            self.traffic.residuals_to_drives += nbytes
        else:
            self.traffic.to_drives += nbytes

    def count_read(self, array: str, nbytes: int) -> None:
        """The host reads so many bytes of an array from the drives."""
        if array == HELD_BACK:
            self.traffic.residuals_from_drives += nbytes
        else:
            self.traffic.from_drives += nbytes

    def passes(self, array: str) -> bool:
        """Whether an array that is reserved now needs no place on the drives."""
        return self.in_step and array in GRADIENTS

    def reserve(self, arrays: Mapping[str, float], *, besides: str = "") -> None:
        """Have arrays on the drives, `besides` one, with their values; in a step gradients are in
        memory already.

        Raises
        ------
        StorageError
        """
        for name, value in arrays.items():
            kept = name in self.on_drives or name == besides
            if not kept and not self.passes(name):
                self._add(name, value)

    def _add(self, name: str, value: float) -> None:
        dtype = self.dtype_of(name)
        for key, count, drive in self.tensors(name):
            self.store.add(key, count * dtype.itemsize, drive=drive)
        self.on_drives.add(name)
        self.changed(name)
        if value == 0.0 or self.has(name):
            return
        for key, count, _ in self.tensors(name):
            data = np.full(min(count, FILLED_ELEMENTS), element(value, dtype), dtype)
            for at in range(0, count, FILLED_ELEMENTS):
                part = data[: count - at]
                self.store.write(key, part, at * dtype.itemsize)
                self.traffic.to_drives += part.nbytes

    def remove(self, name: str) -> None:
        """The drives need not have an array any more."""
        self.on_drives.discard(name)
        self.dirty.discard(name)
        for key, _, _ in self.tensors(name):
            self.store.remove(key)
