"""Checks whether the host has changed parameters, during the first part of a step."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import NamedTuple, Self

from nearstep.backends.base import Completion
from nearstep.errors import Fielded, NearstepError
from nearstep.torch.convert import PartSums


class ChangedParameterError(Fielded, NearstepError):
    """The host has changed a parameter since the last step; the step is repeated.

    The step has committed nothing, and what it changed on the host is restored. Users never see
    this error.
    """

    template = "{parameter} must be as the last step left it, but was changed"
    parameter: str


class CheckedParameter(NamedTuple):
    """A parameter to check.

    Attributes
    ----------
    sums : sums of the parameter's memory, which is constant during the check.
    fingerprint : expected fingerprint of an unchanged parameter.
    """

    label: str
    sums: PartSums
    fingerprint: int


class HostChangeCheck(Completion):
    """A check of parameters in a thread."""

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
    """Checks of the parameters of one optimizer, one for each step.

    A step may begin before its check has ended: until then the step reads, updates and writes only
    uncommitted data, and does not change the host's parameters.

    Attributes
    ----------
    beside : whether the next step begins before its check has ended. After a repeated step, checks
        come first until one finds no change: changes before each step are likely.
    """

    def __init__(self) -> None:
        self.beside = True
        self._look: HostChangeCheck | None = None
        self._last: HostChangeCheck | None = None

    def begin(self, expected: Sequence[CheckedParameter]) -> None:
        """Begin a check of these parameters."""
        self.cancel()
        self._look = self._last = HostChangeCheck(expected) if expected else None

    @property
    def passed(self) -> bool:
        """Whether the step may have changed the host's parameters: the last check has passed."""
        return self._last is None or self._last.done

    def take(self) -> HostChangeCheck | None:
        """Return the check that operations which change the host's parameters must wait for."""
        look, self._look = self._look, None
        return look

    def cancel(self) -> None:
        """Abort the check."""
        look = self.take()
        if look is not None:
            look.abort()
