"""What a drive was given to do, and perhaps still does."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Self

from nearstep.backends.base import Completion
from nearstep.storage.drive_errors import ClosedStoreError, DriveTimeoutError

TIMEOUT_S = 120.0
"""Seconds without any progress after which a wait gives up."""


class Transfer(Completion):
    """Reads or writes of drives.

    Drives have no device time: `cycles` is None, and a wait is bounded by seconds in which no part
    of any transfer of these drives ended.

    Parameters
    ----------
    what : for messages.
    jobs : number of parts that have to end.
    progress : counts the parts of all transfers that have ended on these drives.
    timeout_s
    """

    def __init__(
        self,
        what: str,
        jobs: int,
        progress: Callable[[], int],
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.what = what
        self._left = jobs
        self._progress = progress
        self._timeout_s = timeout_s
        self._error: Exception | None = None
        self._changed = threading.Condition()
        self._process = os.getpid()

    @property
    def ended(self) -> bool:
        return self._left == 0

    @property
    def error(self) -> Exception | None:
        """What it failed with, of several parts the first; None while it has not ended."""
        return self._error if self.ended else None

    @property
    def cycles(self) -> None:
        return None

    def wait(self, max_cycles: int | None = None) -> Self:
        """Wait for the end of all parts, and return self.

        Parameters
        ----------
        max_cycles : means nothing here: a drive has no cycles.

        Raises
        ------
        DriveTimeoutError : nothing ended for too long. It goes on.
        ClosedStoreError : as of `join`.
        StorageError : it failed: `error`.
        """
        self.join()
        if self._error is not None:
            raise self._error
        return self

    def join(self) -> None:
        """Wait for the end, whatever it is.

        Raises
        ------
        DriveTimeoutError
        ClosedStoreError : this is a child of the process that began it, and it had not ended when
            the child was made: what carries it out is not here.
        """
        if self._left == 0:
            return
        if os.getpid() != self._process:  # before the lock, which another thread may have had
            reason = f"of process {self._process}, which began it"
            raise ClosedStoreError(f"the {self.what}", "wait", reason)
        while True:
            before = self._progress()
            with self._changed:
                if self._changed.wait_for(lambda: self._left == 0, self._timeout_s):
                    return
            if self._progress() == before:
                raise DriveTimeoutError(self.what, self._timeout_s)

    def end_part(self, error: Exception | None) -> None:
        """A part has ended, with an error if one is given."""
        with self._changed:
            if error is not None and self._error is None:
                self._error = error
            self._left -= 1
            if self._left == 0:
                self._changed.notify_all()
