"""Devices whose memory a drive reaches without the host: a peer on a switch of their own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Completion, Ended
from nearstep.errors import MemoryBarError


@dataclass
class PeerTraffic:
    """What a drive and the device's memory exchanged since the device was opened.

    Requests, and bytes of their payload. None of them crosses the host's link.

    Attributes
    ----------
    write_tlps, write_bytes : posted writes, from the drive to memory.
    read_tlps : read requests, which have no payload.
    completion_tlps, completion_bytes : their completions, from memory to the drive.
    """

    write_tlps: int = 0
    write_bytes: int = 0
    read_tlps: int = 0
    completion_tlps: int = 0
    completion_bytes: int = 0


class FailedPeerTransfer(Ended):
    """A transfer of a drive that had failed when the call that started it returned.

    Parameters
    ----------
    error : what it failed with.
    """

    def __init__(self, error: MemoryBarError) -> None:
        super().__init__()
        self._failure = error

    @property
    def error(self) -> MemoryBarError:
        return self._failure

    def wait(self, max_cycles: int | None = None) -> Self:
        raise self._failure


class PeerBackend(Backend):
    """A device whose memory a drive beside it reads and writes.

    Transfers of one direction are carried out in the order in which they were submitted, those of
    both directions at once, while device time passes. They have no order against what the host and
    the kernel do with memory: whoever submits them sees to that. An access that memory refuses
    fails its transfer, with `PeerReadError` or `PeerWriteError`; the other accesses of the transfer
    are carried out. A reset gives up what has not ended.
    """

    @property
    @abstractmethod
    def peer_traffic(self) -> PeerTraffic:
        """What has crossed between drive and memory."""

    @abstractmethod
    def submit_peer_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        """Begin to copy the contiguous array `data` from the drive to memory at `address`; it must
        live, and not change, until that has ended.

        Raises
        ------
        OutOfBoundsError : nothing was begun.
        """

    @abstractmethod
    def submit_peer_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        """Begin to copy memory from `address` to the drive, into the contiguous array `out`; it
        must live, and nobody look at it, until that has ended.

        Raises
        ------
        OutOfBoundsError : nothing was begun.
        """

    def peer_window(self, address: int, nbytes: int) -> NDArray[np.uint8] | None:
        """Memory of this process that is the device's; None if there is none now.

        It is read and written in the place of `submit_peer_read` and `submit_peer_write`, and its
        pages are those of the addresses.
        Who uses it says so with `end_peer_read` or `end_peer_write`; until then nobody else uses
        the range.

        Raises
        ------
        OutOfBoundsError
        """
        return None

    def end_peer_write(self, address: int, nbytes: int) -> None:
        """Count what was written through a window: as traffic, and as written memory."""

    def end_peer_read(self, address: int, nbytes: int) -> None:
        """Count what was read through a window, as traffic."""
