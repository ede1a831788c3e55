"""Transfers of a simulated device that are not known to have ended."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from nearstep.errors import (
    RESPONSES,
    ClosedDeviceError,
    CompletionError,
    DeviceError,
    PeerReadError,
    PeerWriteError,
    PostedWriteError,
)
from nearstep_sim.updater.transfer import DeviceTransfer
from nearstep_sim.verilate.abi import structure

STATUS = (*RESPONSES, "timeout")
"""Status of a request of the host, or of a drive, to the memory, by code."""

_GIVEN_UP = len(STATUS)

_End = structure("models/peer_dma.hpp", "PeerEnd")

_Next = Callable[[Any], int]
"""Fills a `PeerEnd` that has not been reported; 0 if there is none."""


class InFlight:
    """Transfers by their numbers in the device's DMA engine.

    Parameters
    ----------
    status : text of a status, by code.
    """

    def __init__(self, status: Callable[[int], str] = STATUS.__getitem__) -> None:
        self._status = status
        self._transfers: dict[int, DeviceTransfer] = {}
        self._last = 0

    def add(self, transfer: DeviceTransfer) -> int:
        """Register a transfer that is about to begin; return its number."""
        self._last += 1
        self._transfers[self._last] = transfer
        return self._last

    def look(self, ended: _Next) -> None:
        """Complete the transfers that have ended; no error is raised."""
        end = _End()
        while ended(ctypes.byref(end)):
            transfer = self._transfers.pop(end.number)
            transfer.end(end.cycle, _error(transfer, end, self._status))

    def close(self, name: str) -> None:
        """End all transfers with the error that the device of this name is closed."""
        while self._transfers:
            _, transfer = self._transfers.popitem()
            transfer.end(0, ClosedDeviceError(name, f"end the {transfer.what}"))


def _error(transfer: DeviceTransfer, end: Any, status: Callable[[int], str]) -> DeviceError | None:
    """Return the error of a transfer, if it failed."""
    if not end.response:
        return None
    transactions = transfer.device.transactions()
    if end.response == _GIVEN_UP:
        return DeviceError(f"{transfer.what} was given up", transactions=transactions)
    host, drive = (CompletionError, PostedWriteError), (PeerReadError, PeerWriteError)
    kind = (host if transfer.host else drive)[bool(end.write)]
    return kind(end.address, status(end.response), transactions=transactions)
