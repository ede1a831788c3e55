"""A transfer of a DMA engine from or to the memory of a simulated device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Completion
from nearstep.errors import NearstepError, WaitTimeoutError
from nearstep.run import check_bound

_FOREVER = 1 << 32
"""Timeout in cycles; a hung transfer is detected before."""


class Transferring(Protocol):
    """Executor of a transfer."""

    def look_at_transfers(self) -> None: ...

    def transactions(self) -> Sequence[str]: ...


class DeviceTransfer(Completion):
    """A copy from or to the memory of a device that progresses with the device's time.

    Parameters
    ----------
    device : executor of the transfer; a `Backend`.
    begun : the device's cycle of its submission.
    keep : memory that the transfer reads or writes.
    host : the transfer is the host's, not a drive's.

    Attributes
    ----------
    backend : advanced by `wait`: the device, or the array of devices that has it.
    note : text for the error, such as the device's name.
    """

    def __init__(
        self,
        device: Transferring,
        what: str,
        begun: int,
        keep: NDArray[np.uint8],
        *,
        host: bool = False,
    ) -> None:
        assert isinstance(device, Backend)
        self.device: Transferring = device
        self.backend: Backend = device
        self.what = what
        self.host = host
        self.note = ""
        self._begun = begun
        self._keep: NDArray[np.uint8] | None = keep
        self._cycles: int | None = None
        self._error: NearstepError | None = None

    @property
    def ended(self) -> bool:
        if self._keep is not None:
            self.device.look_at_transfers()
        return self._keep is None

    @property
    def error(self) -> NearstepError | None:
        return self._error if self.ended else None

    @property
    def cycles(self) -> int | None:
        return self._cycles if self.ended else None

    def end(self, cycle: int, error: NearstepError | None) -> None:
        """Complete the transfer in a cycle of the device, or with an error."""
        self._keep = None
        self._error = error
        if error is None:
            self._cycles = cycle - self._begun
        elif self.note:
            error.add_note(self.note)

    def wait(self, max_cycles: int | None = None) -> Self:
        check_bound(max_cycles)
        end = None if max_cycles is None else (self.backend.cycles or 0) + max_cycles
        while not self.ended:
            left = _FOREVER if end is None else min(_FOREVER, end - (self.backend.cycles or 0))
            if left <= 0:
                raise WaitTimeoutError(
                    self.what, max_cycles or 0, transactions=self.backend.transactions()
                )
            self.backend.advance(left)
        if self._error is not None:
            raise self._error
        return self
