"""What a step reads first, begun while it is not known yet what else the step does."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from nearstep.backends.base import Completion
from nearstep.buffer import Buffer
from nearstep.errors import DeviceError
from nearstep.smartssd.peer import PeerToPeer
from nearstep.storage.drive_errors import StorageError
from nearstep.storage.store import Store
from nearstep.torch.traffic import Traffic


class Place(NamedTuple):
    """What is read, and to where.

    Attributes
    ----------
    key : name of a tensor.
    offset : in it, in bytes.
    address, nbytes : of the memory.
    """

    key: str
    offset: int
    address: int
    nbytes: int


class Prefetcher:
    """Reads subgroups, the first ones of a step ahead of it.

    A drive need not rest while the host looks for parameters that were changed: it reads what the
    step before has read first. What this step does not want, or what was written since, is dropped.
    """

    def __init__(self, peer: PeerToPeer, traffic: Traffic) -> None:
        self._peer = peer
        self._traffic = traffic
        self._first: list[tuple[Place, Buffer]] = []
        self._generation = -1
        self._begins = True
        self._under_way: dict[Place, Completion] = {}

    def use(self, store: Store) -> None:
        """Read from another store of the same drives."""
        self._peer.store = store

    def begin(self) -> None:
        """Begin to read what the step before has read first.

        Nobody else uses that memory until `discard_stale` or `cancel`.
        """
        self.cancel()
        self._begins = True
        self._generation = self._peer.store.generation
        there = self._peer.store.tensors
        for place, room in self._first:
            if place.key not in there:
                continue
            try:
                self._under_way[place] = self._begin(place, room)
            except (DeviceError, StorageError):
                return  # the step itself comes to it, after what has to be kept

    def discard_stale(self, first: Iterable[tuple[str, int, Buffer]], *, written: bool) -> None:
        """A step, or another unit of one, is about to begin.

        Parameters
        ----------
        first : tensor, offset in bytes and memory of what it reads first, before anything is
            written there.
        written : something may have been written since `begin` that no generation has.
        """
        places = [(_place(*each), each[2]) for each in first]
        wanted = {place for place, _ in places}
        if self._begins:
            self._begins, self._first = False, places
        stale = written or self._peer.store.generation != self._generation
        if stale or not wanted.issuperset(self._under_way):
            self.cancel()

    def load(self, key: str, offset: int, room: Buffer) -> Completion:
        """Begin to read a tensor from byte `offset` on into a buffer, unless that has been done."""
        place = _place(key, offset, room)
        begun = self._under_way.pop(place, None)
        return self._begin(place, room) if begun is None else begun

    def cancel(self) -> None:
        """Nobody wants what has been begun.

        Raises
        ------
        DriveTimeoutError : it goes on.
        """
        under_way, self._under_way = self._under_way, {}
        for each in under_way.values():
            try:
                each.wait()
            except (DeviceError, StorageError):
                if not each.ended:
                    raise

    def _begin(self, place: Place, room: Buffer) -> Completion:
        reading = self._peer.load(place.key, place.offset, room)
        self._traffic.drives_to_cards += place.nbytes
        return reading


def _place(key: str, offset: int, room: Buffer) -> Place:
    return Place(key, offset, room.address, room.nbytes)
