"""Runs that switch the mode of their channel, and begin and end in normal mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Self

from nearstep.backends.base import Completion, Poll
from nearstep.errors import ArgumentError, BusyError, ClosedDeviceError, DeviceError, ModeError
from nearstep.run import Run

CHECKED = (ArgumentError, BusyError, ClosedDeviceError, ModeError)
"""Errors that a start raises before the device gets a command."""


class AcceleratedRuns(Completion):
    """Consecutive runs on a channel that is in acceleration mode for them alone.

    A wait, or a check of a finished run, starts the next one.

    Parameters
    ----------
    starts : each starts a run; at least one.
    contexts : entered before the first run starts; their exits return the channel to the host.
    max_cycles : bound on each run. None: that of the run.

    Attributes
    ----------
    runs : that have been started.
    has_begun : the first run may have been started, even if its start raised an error: the answer
        to the command can be lost.
    """

    def __init__(
        self,
        starts: Iterable[Callable[[], Run]],
        *contexts: AbstractContextManager[None],
        max_cycles: int | None = None,
    ) -> None:
        self._starts = list(starts)
        self._contexts = contexts
        self._max_cycles = max_cycles
        self._mode = ExitStack()
        self._runs: list[Run] = []
        self.has_begun = False

    def start(self) -> Self:
        """Enter the contexts and start the first run; an error exits the contexts."""
        with ExitStack() as failed:
            failed.push(self._mode)
            for each in self._contexts:
                self._mode.enter_context(each)
            self.has_begun = True
            try:
                self._runs.append(self._starts.pop(0)())
            except CHECKED:
                self.has_begun = False
                raise
            failed.pop_all()
        self.backend = self._runs[0].backend
        return self

    @property
    def runs(self) -> Sequence[Run]:
        return tuple(self._runs)

    @property
    def ended(self) -> bool:
        while self._runs[-1].ended:
            if not self._starts or self._runs[-1].error is not None:
                return True
            self._runs.append(self._starts.pop(0)())
        return False

    @property
    def error(self) -> DeviceError | None:
        return self._runs[-1].error

    @property
    def cycles(self) -> int | None:
        """Cycles of the runs together."""
        each = [run.cycles for run in self._runs]
        known = [cycles for cycles in each if cycles is not None]
        return sum(known) if len(known) == len(each) and not self._starts else None

    @property
    def polls(self) -> Sequence[Poll]:
        return self._runs[-1].polls

    @property
    def bound(self) -> int | None:
        """Bound of the started runs together.

        Each run counts one more cycle, after which a check finds it unfinished.
        """
        bounds = [run.bound if self._max_cycles is None else self._max_cycles for run in self._runs]
        known = [bound for bound in bounds if bound is not None]
        return sum(known) + len(known) - 1 if len(known) == len(bounds) else None

    def wait(self, max_cycles: int | None = None) -> Self:
        """Wait as `nearstep.run.Run.wait`, for each run in so many cycles, and return the channel
        to the host unless a run continues."""
        each = self._max_cycles if max_cycles is None else max_cycles
        try:
            self._runs[-1].wait(each)
            while not self.ended:
                self._runs[-1].wait(each)
        finally:
            if self._runs[-1].ended:
                self._mode.close()
        return self

    def abort(self, max_cycles: int | None = None) -> None:
        self._starts.clear()
        try:
            for last in self._runs[-1:]:  # none if an exception came first
                last.abort(max_cycles)
        finally:
            self._mode.close()
