"""Peer to peer: arrays between the drive of a card and the card's DRAM."""

from __future__ import annotations

from typing import Any

import numpy as np

from nearstep.backends.base import Backend, ChainedCompletion, Completion
from nearstep.backends.peer import PeerBackend
from nearstep.buffer import Buffer
from nearstep.errors import MismatchError
from nearstep.storage.aligned import AlignedPool
from nearstep.storage.store import Store


class PeerToPeer:
    """Transfers of arrays between drives and cards over the cards' own switches.

    The host's link is not used. If the memory of a card is memory of this process, drives read into
    it and write from it directly, like `pread` and `pwrite` on a card's window (section VI);
    otherwise transfers use the card's port, and take device time.

    Parameters
    ----------
    backend : of the cards.
    store : has a drive for each card.

    Raises
    ------
    MismatchError : the device has no drives that access its memory.

    Ref: Smart-Infinity, sections IV-A and VI.
    """

    def __init__(self, backend: Backend, store: Store) -> None:
        if not isinstance(backend, PeerBackend):
            raise MismatchError("device", "of cards with drives", type(backend).__name__)
        self._backend = backend
        self.store = store
        self._pool = AlignedPool()

    def load(self, key: str, offset: int, buffer: Buffer) -> Completion:
        """Begin to read a tensor from byte `offset` on into a buffer, which must not be used until
        the read has ended.

        Raises
        ------
        StorageError, DeviceError : now, or from the completion.
        """
        backend, where = self._backend, (buffer.address, buffer.nbytes)
        window = backend.peer_window(*where)
        if window is not None:
            reading = self.store.submit_read(key, window, offset)
            return ChainedCompletion(reading, lambda: backend.end_peer_write(*where))
        data = self._bytes(buffer)
        self.store.read(key, data, offset)
        return backend.submit_peer_write(buffer.address, data)

    def save(self, key: str, offset: int, buffer: Buffer) -> Completion:
        """Begin to write a buffer to a tensor, from byte `offset` on.

        As `load`.
        """
        backend, where = self._backend, (buffer.address, buffer.nbytes)
        window = backend.peer_window(*where)
        if window is not None:
            writing = self.store.submit_write(key, window, offset)
            return ChainedCompletion(writing, lambda: backend.end_peer_read(*where))
        data = self._bytes(buffer)
        reading = backend.submit_peer_read(buffer.address, data)
        return ChainedCompletion(reading, lambda: self.store.write(key, data, offset))

    def _bytes(self, buffer: Buffer) -> Any:
        return self._pool.empty(buffer.nbytes, np.uint8)
