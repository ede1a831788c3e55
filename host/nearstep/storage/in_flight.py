"""Transfers of a store that have not ended, by the blocks of tensors that they touch."""

from __future__ import annotations

from typing import NamedTuple

from nearstep.storage.drive import Transfer


class _Touch(NamedTuple):
    tensor: str
    first: int
    last: int
    writes: bool
    transfer: Transfer


class InFlight:
    """Transfers that have not ended. Only the thread that has the store's lock uses it."""

    def __init__(self) -> None:
        self._touches: list[_Touch] = []

    def add(self, tensor: str, first: int, last: int, transfer: Transfer, *, writes: bool) -> None:
        """Keep a transfer of blocks [first, last) of a tensor in mind."""
        self._touches = [each for each in self._touches if not each.transfer.ended]
        self._touches.append(_Touch(tensor, first, last, writes, transfer))

    def join(self, tensor: str, first: int, last: int, *, writes: bool) -> None:
        """Wait for the end, with or without error, of what touches these blocks: of all of it for
        one that `writes`, else of the writes.
        """
        for each in self._touches:
            if each.tensor == tensor and each.first < last and first < each.last:
                if writes or each.writes:
                    each.transfer.join()

    def join_all(self) -> None:
        """Wait for the end of all."""
        for each in self._touches:
            each.transfer.join()
        self._touches = []
