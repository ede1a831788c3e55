"""Waits for a device on another machine, by polls of its registers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from nearstep.backends.base import Backend, Poll
from nearstep.errors import WaitTimeoutError

MOST_POLLS = 16
"""Most polls between two reads of the clock."""


class PollingBackend(Backend):
    """A device that runs by itself, with a clock that is read like a register."""

    @property
    @abstractmethod
    def unit(self) -> str:
        """Unit of the clock."""

    @property
    @abstractmethod
    def now(self) -> int:
        """Value of the clock; the read takes time, too."""

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        begun: int | None = None
        looked, between = 0, 1
        while True:
            if any(poll.holds(self.read_register(poll.address)) for poll in polls):
                return
            looked += 1
            if begun is None:
                begun, looked = self.now, 0
            elif looked >= between or not polls:
                looked, between = 0, min(2 * between, MOST_POLLS)
                if self.now - begun < max_cycles:
                    continue
                # The condition may have become true between the poll and the read of the clock.
                if any(poll.holds(self.read_register(poll.address)) for poll in polls):
                    return
                raise WaitTimeoutError(
                    " or ".join(map(str, polls)) or "the end of that time",
                    max_cycles,
                    unit=self.unit,
                    transactions=self.transactions(),
                )
