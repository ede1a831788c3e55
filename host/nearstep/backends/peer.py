"""Devices whose memory a drive accesses without the host: a peer on a private switch."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Completion, Ended
from nearstep.errors import MemoryBarError
from nearstep_spec.platform.machine import Duplex, Hop


@dataclass
class PeerTraffic:
    """Traffic between a drive and the device's memory since the device was opened.

    Requests, and bytes of their payload; the host's link carries none of these.

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


@dataclass(frozen=True)
class HostLinks:
    """Links between the host and cards.

    Attributes
    ----------
    uplink_bytes_per_s : of the link that all cards share; None: no bound.
    uplink_duplex : `half` if both directions share that rate.
    link_bytes_per_s : of the link of one card; None: bounded by the card's port only.

    Ref: Smart-Infinity, figure 2 and table II.
    """

    uplink_bytes_per_s: int | None = None
    link_bytes_per_s: int | None = None
    uplink_duplex: Duplex = "full"

    def route(self, card: int, direction: int) -> tuple[Hop, ...]:
        """Return the bounded links of a transfer to (0) or from (1) a card."""
        rates = {"uplink": self.uplink_bytes_per_s, f"link {card}": self.link_bytes_per_s}
        half = "uplink" if self.uplink_duplex == "half" else None
        return tuple(
            Hop(
                link=link,
                direction=direction,
                lane="uplink" if link == half else f"{link} {('down', 'up')[direction]}",
                bytes_per_s=float(rate),
            )
            for link, rate in rates.items()
            if rate is not None
        )


class FailedPeerTransfer(Ended):
    """A transfer of a drive that had failed when the submitting call returned."""

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

    Transfers of one direction are executed in the order of submission, both directions
    concurrently, while device time passes. They are not ordered with accesses of host and kernel:
    that is up to the caller. A refused access fails its transfer, with `PeerReadError` or
    `PeerWriteError`; the other accesses of the transfer are executed. A reset cancels unfinished
    transfers.

    Attributes
    ----------
    links : of the host to each card and of all cards together, if their rates are bounded.
    hertz : cycles in a second, if known.
    """

    links: HostLinks = HostLinks()
    hertz: float | None = None

    @property
    @abstractmethod
    def peer_traffic(self) -> PeerTraffic:
        """Traffic between drive and memory."""

    @abstractmethod
    def submit_peer_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        """Begin to copy the contiguous array `data` from the drive to memory at `address`; the
        array must live, and not change, until the end.

        Raises
        ------
        OutOfBoundsError : nothing was begun.
        """

    @abstractmethod
    def submit_peer_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        """Begin to copy memory from `address` to the drive, into the contiguous array `out`; the
        array must live, and not be accessed, until the end.

        Raises
        ------
        OutOfBoundsError : nothing was begun.
        """

    def submit_host_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        """Submit a write by a DMA engine of the host, concurrently with other cards, like a
        transfer of the drive.

        Raises
        ------
        OutOfBoundsError : nothing was begun.
        """
        return self.submit_write(address, data)

    def submit_host_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        """Submit a read by a DMA engine of the host, as `submit_host_write`."""
        return self.submit_read(address, out)

    def peer_window(self, address: int, nbytes: int) -> NDArray[np.uint8] | None:
        """Return the part of device memory that is memory of this process; None if unavailable.

        It replaces `submit_peer_read` and `submit_peer_write`, and has the page offsets of the
        addresses. The user ends the access with `end_peer_read` or `end_peer_write`; until then the
        range is reserved.

        Raises
        ------
        OutOfBoundsError
        """
        return None

    def end_peer_write(self, address: int, nbytes: int) -> None:
        """Count bytes written through a window, as traffic and as written memory."""

    def end_peer_read(self, address: int, nbytes: int) -> None:
        """Count bytes read through a window, as traffic."""
