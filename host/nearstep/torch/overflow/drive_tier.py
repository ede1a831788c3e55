"""What keeps the state of an optimizer on drives, wherever these are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import numpy as np
from torch import Tensor

from nearstep.storage.drive_errors import StorageError, UncertainCommitError
from nearstep.storage.store import Store
from nearstep.torch.device_gradient import DeviceGradient
from nearstep.torch.overflow.drive_segment import GRADIENTS, DriveSegment
from nearstep.torch.overflow.held_store import HeldStore
from nearstep.torch.overflow.undo import Undo
from nearstep.torch.parameter import DeviceParameter

AnySegment = TypeVar("AnySegment", bound=DriveSegment)


class DriveTier(ABC, Generic[AnySegment]):
    """Segments of one optimizer whose arrays lie on the drives of a store.

    Parameters
    ----------
    drives

    Attributes
    ----------
    drives : whose store the segments share.
    source : drives that the state is copied from when it is resumed; None: `store`.
    replaces : whether these are removed then.
    segments : in the order in which a step updates them.
    resident : class of the parameters.
    recovers : after `go_back` a device that failed in a step has left nothing undone, whatever
        failed: the drives have all that there was.
    """

    resident: type[DeviceParameter] = DeviceParameter
    recovers = False

    def __init__(self, drives: HeldStore) -> None:
        self.drives = drives
        self.source: Store | None = None
        self.replaces = False
        self.segments: list[AnySegment] = []

    @property
    def store(self) -> Store:
        """The store, open. Raises `StorageError`."""
        return self.drives.store

    @property
    @abstractmethod
    def peak(self) -> int:
        """Most bytes of memory of the device that were in use."""

    @abstractmethod
    def units(self, parameters: Sequence[Tensor]) -> list[list[Tensor]]:
        """Parameters, each with those that share a segment with it."""

    @abstractmethod
    def segment(
        self, counts: Sequence[int], line: int, dtypes: Mapping[str, np.dtype], keys: Sequence[str]
    ) -> AnySegment:
        """A segment for parameters of so many elements, whose names on drives are `keys`."""

    @abstractmethod
    def check_room(self, segment: AnySegment, arrays: Sequence[str], label: str) -> None:
        """Raise `MemoryTooSmallError` unless arrays of one unit fit into memory together."""

    @abstractmethod
    def begin(self) -> None:
        """All parameters of the constructor are there. Raises `MemoryTooSmallError`."""

    def layout(self, names: Mapping[Tensor, str]) -> Mapping[str, Any] | None:
        """Where the arrays of parameters of these names lie, for the meta data of a generation;
        None: of each there is a tensor."""
        return None

    def clear(self) -> None:
        """From the next generation on the drives have nothing of what they have now.

        Raises
        ------
        StorageError
        """
        for name in self.store.tensors:
            self.store.remove(name)
        for segment in self.segments:
            segment.find()

    def add(self, segment: AnySegment) -> None:
        """One more."""
        segment.unit = len(self.segments)
        self.segments.append(segment)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Gradients that are reserved in it do not outlast it."""
        for segment in self.segments:
            segment.in_step = True
        try:
            yield
        finally:
            for segment in self.segments:
                segment.in_step = False

    @property
    def is_dirty(self) -> bool:
        """Whether something was written that no generation has."""
        return any(segment.dirty for segment in self.segments)

    @property
    def has_changes_besides_gradients(self) -> bool:
        """Whether any of that is no gradient."""
        return any(segment.dirty.difference(GRADIENTS) for segment in self.segments)

    @property
    def has_changed_away(self) -> bool:
        """Whether any of that is of a parameter that the host has not."""
        return any(
            "p" in segment.dirty and any(resident.offloaded for resident in segment.residents)
            for segment in self.segments
        )

    @abstractmethod
    def prepare(self, residents: Iterable[DeviceParameter], *, anew: bool = False) -> None:
        """A step of these begins; what it finds on the drives becomes a generation first.

        Parameters
        ----------
        residents
        anew : it had begun, and then it was found that a parameter had been changed.
        """

    @abstractmethod
    def keep(self, undo: Undo, residents: Iterable[DeviceParameter]) -> None:
        """An update of these begins, which may have to be undone."""

    @abstractmethod
    def restore(self, residents: Iterable[DeviceParameter]) -> None:
        """After `go_back` and `Undo.restore` of an update that had begun: have what else the host
        had of these."""

    @abstractmethod
    def bring(self, segment: AnySegment, arrays: Mapping[str, float]) -> None:
        """Arrays of a unit are about to be updated."""

    @abstractmethod
    def prefetch(self, segment: AnySegment, arrays: Mapping[str, float]) -> None:
        """Those of another will be next."""

    @abstractmethod
    def write_masters(self) -> None:
        """Have the drives know the parameters as they are on the host.

        Raises
        ------
        StorageError
        """

    def commit(self, meta: Mapping[str, Any]) -> None:
        """Make all that was written a generation.

        If the last write fails, the drives are read to find out whether the generation counts. If
        it does, this returns; if not, the error of the write is raised.

        Raises
        ------
        UncertainCommitError : the drives could not be read.
        StorageError
        """
        try:
            self.store.commit(meta)
        except UncertainCommitError as error:
            self.drives.doubt(error.generation)
            try:
                counts = self.store.generation == error.generation
            except StorageError:
                raise error from error.__cause__
            if not counts:
                raise error.__cause__ or error from None
        self.clean()

    def clean(self) -> None:
        """The last generation has all that was written."""
        for segment in self.segments:
            segment.dirty.clear()

    def go_back(self) -> None:
        """Everything is as the last generation has it, and nothing in memory.

        Raises
        ------
        StorageError
        """
        self.store.abort()  # waits for what is under way
        self.forget()
        for segment in self.segments:
            segment.dirty.clear()
            segment.find()

    @abstractmethod
    def forget(self) -> None:
        """Nothing is in memory; what was written there alone is lost."""

    def forget_gradients(self, segment: AnySegment) -> None:
        """Those that the device need not keep any more leave the drives."""
        if any(isinstance(resident.held, DeviceGradient) for resident in segment.residents):
            return
        for name in segment.on_drives.intersection(GRADIENTS):
            segment.remove(name)
