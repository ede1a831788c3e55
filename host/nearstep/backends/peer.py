"""Devices whose memory a drive reaches without the host: a peer on a switch of their own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Completion, Ended
from nearstep.errors import MemoryBarError
from nearstep_spec.platform.machine import Hop


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


@dataclass(frozen=True)
class HostLinks:
    """Links between the host and cards; each way of each has the rate for itself.

    Attributes
    ----------
    uplink_bytes_per_s : of the link that all cards share; None is no bound.
    link_bytes_per_s : of the link of one card; None is no bound but the card's port.

    Ref: Smart-Infinity, figure 2 and table II.
    """

    uplink_bytes_per_s: int | None = None
    link_bytes_per_s: int | None = None

    def route(self, card: int, direction: int) -> tuple[Hop, ...]:
        """What bytes to (0) or from (1) a card go over, of what has a bound."""
        rates = {"uplink": self.uplink_bytes_per_s, f"link {card}": self.link_bytes_per_s}
        return tuple(
            Hop(
                link=link,
                direction=direction,
                lane=f"{link} {('down', 'up')[direction]}",
                bytes_per_s=float(rate),
            )
            for link, rate in rates.items()
            if rate is not None
        )


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

    Attributes
    ----------
    links : of the host to each card and of all cards together, as far as their rates are bounded.
    hertz : cycles in a second, if that is known.
    """

    links: HostLinks = HostLinks()
    hertz: float | None = None

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

    def submit_host_write(self, address: int, data: NDArray[np.uint8]) -> Completion:
        """`submit_write` by a DMA engine of the host, as a transfer of the drive: device time
        passes for those of several cards at once.

        Raises
        ------
        OutOfBoundsError : nothing was begun.
        """
        return self.submit_write(address, data)

    def submit_host_read(self, address: int, out: NDArray[np.uint8]) -> Completion:
        """`submit_read` by a DMA engine of the host. As `submit_host_write`."""
        return self.submit_read(address, out)

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
