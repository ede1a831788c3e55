"""Transfers of a store in flight, by the tensor blocks that they access."""

from __future__ import annotations

from typing import NamedTuple

from nearstep.storage.drive import DriveTransfer


class _Touch(NamedTuple):
    tensor: str
    first: int
    last: int
    writes: bool
    transfer: DriveTransfer


class InFlight:
    """Transfers in flight; the caller holds the lock of the store."""

    def __init__(self) -> None:
        self._touches: list[_Touch] = []

    def add(
        self, tensor: str, first: int, last: int, transfer: DriveTransfer, *, writes: bool
    ) -> None:
        """Add a transfer of blocks [first, last) of a tensor."""
        self._touches = [each for each in self._touches if not each.transfer.ended]
        self._touches.append(_Touch(tensor, first, last, writes, transfer))

    def join(self, tensor: str, first: int, last: int, *, writes: bool) -> None:
        """Wait for the end of transfers of these blocks, with or without an error: of all transfers
        if `writes`, else of writes."""
        for each in self._touches:
            if each.tensor == tensor and each.first < last and first < each.last:
                if writes or each.writes:
                    each.transfer.join()

    def join_all(self) -> None:
        """Wait for the end of all transfers."""
        for each in self._touches:
            each.transfer.join()
        self._touches = []
