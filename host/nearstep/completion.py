"""The end of something that was started: a run, a transfer, a reduction."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from nearstep.backends.base import Backend, Poll


class Completion(ABC):
    """Something that a device was given, and perhaps still works on.

    Attributes
    ----------
    backend: Backend | None
        Whose time has to pass for it to end; None if it has ended.
    """

    backend: Backend | None = None

    @property
    @abstractmethod
    def ended(self) -> bool:
        """Whether it has completed or failed. Looks at the device, does not wait."""

    @property
    @abstractmethod
    def error(self) -> Exception | None:
        """What it failed with, None while it has not."""

    @property
    def done(self) -> bool:
        """Whether it has completed without error. Looks at the device, does not wait."""
        return self.ended and self.error is None

    @property
    @abstractmethod
    def cycles(self) -> int | None:
        """Device cycles from its start to its end; None before that, or without a clock."""

    @property
    def polls(self) -> Sequence[Poll]:
        """One of these holds when it may have ended; empty where the backend sees it by itself."""
        return ()

    @property
    def bound(self) -> int | None:
        """Device cycles that are enough for it; None if the backend says so when it hangs."""
        return None

    @abstractmethod
    def wait(self, max_cycles: int | None = None) -> Self:
        """Let the device run until this has ended, and return self.

        Parameters
        ----------
        max_cycles: int | None
            Bound in device cycles (steps, on a device without a clock). None: ``bound``.

        Raises
        ------
        ArgumentError
            ``max_cycles`` is no integer, or negative.
        WaitTimeoutError
            It did not end in time, and goes on.
        NearstepError
            It failed: ``error``.
        """

    def abort(self, max_cycles: int | None = None) -> None:
        """End it, whatever becomes of its results. What cannot be ended is waited for."""
        try:
            self.wait(max_cycles)
        except Exception:
            if not self.ended:
                raise


class Ended(Completion):
    """Something that had ended, without error, when the call that started it returned.

    Parameters
    ----------
    cycles: int | None
        That it took.
    """

    def __init__(self, cycles: int | None = None) -> None:
        self._cycles = cycles

    @property
    def ended(self) -> bool:
        return True

    @property
    def error(self) -> None:
        return None

    @property
    def cycles(self) -> int | None:
        return self._cycles

    def wait(self, max_cycles: int | None = None) -> Self:
        return self
