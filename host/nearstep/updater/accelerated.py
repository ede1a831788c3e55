"""A run with the mode of its channel: what begins and ends in normal mode."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Self

from nearstep.backends.base import Completion, Poll
from nearstep.errors import DeviceError
from nearstep.run import Run


class AcceleratedRun(Completion):
    """A run on a channel that was given to its kernel for it alone.

    Parameters
    ----------
    run: Run
    mode: ExitStack
        Gives the channel back to the host.

    Attributes
    ----------
    run: Run
    """

    def __init__(self, run: Run, mode: ExitStack) -> None:
        self.run = run
        self.backend = run.backend
        self._mode = mode

    @property
    def ended(self) -> bool:
        return self.run.ended

    @property
    def error(self) -> DeviceError | None:
        return self.run.error

    @property
    def cycles(self) -> int | None:
        return self.run.cycles

    @property
    def polls(self) -> Sequence[Poll]:
        return self.run.polls

    @property
    def bound(self) -> int | None:
        return self.run.bound

    def wait(self, max_cycles: int | None = None) -> Self:
        """As :meth:`nearstep.run.Run.wait`; then the channel is the host's, unless it goes on."""
        try:
            self.run.wait(max_cycles)
        finally:
            if self.run.ended:
                self._mode.close()
        return self

    def abort(self, max_cycles: int | None = None) -> None:
        try:
            self.run.abort(max_cycles)
        finally:
            self._mode.close()
