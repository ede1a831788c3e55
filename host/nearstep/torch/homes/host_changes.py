"""Whether the host has changed parameters, found out while a step begins."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, Self

from nearstep.backends.base import Completion
from nearstep.errors import Fielded, NearstepError
from nearstep.torch.convert import PartSums


class ChangedParameterError(Fielded, NearstepError):
    """A parameter is not as the last step left it: the step begins anew, with what it is now.

    Nothing that it has written counts, and nothing of it has reached the host. Users never see
    this.
    """

    template = "{parameter} must be as the last step left it, but was changed"
    parameter: str


class CheckedParameter(NamedTuple):
    """A parameter that is to be looked at.

    Attributes
    ----------
    sums : of its memory, which nobody changes meanwhile.
    fingerprint : that it has if it was not changed.
    """

    label: str
    sums: PartSums
    fingerprint: int


class HostChangeCheck(Completion):
    """Parameters that a thread looks at."""

    is_background = True

    def __init__(self, expected: Sequence[CheckedParameter]) -> None:
        self._error: Exception | None = None
        self._done = threading.Event()
        work = threading.Thread(target=self._work, args=(expected,), daemon=True)
        work.start()

    def _work(self, expected: Sequence[CheckedParameter]) -> None:
        try:
            for label, sums, fingerprint in expected:
                sums.make_all()
                if sums.fingerprint != fingerprint:
                    raise ChangedParameterError(label)
        except Exception as error:
            self._error = error
        finally:
            self._done.set()

    @property
    def ended(self) -> bool:
        return self._done.is_set()

    @property
    def error(self) -> Exception | None:
        return self._error if self.ended else None

    @property
    def cycles(self) -> None:
        return None

    def wait(self, max_cycles: int | None = None) -> Self:
        """Wait for the end, and return self.

        Raises
        ------
        ChangedParameterError
        """
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self


class HostChangeChecks:
    """At the parameters of one optimizer, once a step.

    A step may begin before it is known whether the host has changed a parameter: until then it
    reads, updates and writes what counts only after a commit, but leaves the host as it is.

    Attributes
    ----------
    beside : whether the next step is to begin so. Whoever changes parameters before a step does so
        again: after one that had to begin anew, steps look first, until nothing is found.
    """

    def __init__(self) -> None:
        self.beside = True
        self._look: HostChangeCheck | None = None
        self._last: HostChangeCheck | None = None

    def begin(self, expected: Sequence[CheckedParameter]) -> None:
        """Begin to look at these."""
        self.cancel()
        self._look = self._last = HostChangeCheck(expected) if expected else None

    @property
    def passed(self) -> bool:
        """Whether nothing of the host is to be left as it is any more."""
        return self._last is None or self._last.done

    def take(self) -> HostChangeCheck | None:
        """What the operations have to wait for that change the host's parameters."""
        look, self._look = self._look, None
        return look

    def cancel(self) -> None:
        """Nobody wants to know any more."""
        look = self.take()
        if look is not None:
            look.abort()
