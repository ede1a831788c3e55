"""Calls that another thread of this process makes meanwhile, such as long copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Self

from nearstep.backends.base import Completion
from nearstep.threads import begin_call


class BackgroundCall(Completion):
    """A call that has been begun, and ends without any device time.

    It cannot be ended early: an abort waits for it.

    Parameters
    ----------
    call : touches nothing that others use before it has ended. Made at once by this thread, where
        there may be no other: see `nearstep.threads.VARIABLE`.
    """

    def __init__(self, call: Callable[[], None]) -> None:
        self._future = begin_call(call)

    @property
    def ended(self) -> bool:
        return self._future.done()

    @property
    def error(self) -> Exception | None:
        error = self._future.exception() if self.ended else None
        return error if isinstance(error, Exception) else None

    @property
    def cycles(self) -> None:
        return None

    def wait(self, max_cycles: int | None = None) -> Self:
        """Wait for the end, and return self.

        Parameters
        ----------
        max_cycles : means nothing here.

        Raises
        ------
        Exception : what the call raised.
        """
        self._future.result()
        return self
