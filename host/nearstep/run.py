"""A command that a kernel has been given."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Self

from nearstep.backends.base import Completion
from nearstep.errors import ArgumentError, DeviceError
from nearstep.scalars import is_whole

MAX_BOUND = 1 << 64
"""Bounds of waits are below it: backends count device cycles in 64 bits."""

BOUND = "an integer from 0 to 2**64 - 1, or None"
"""What a bound of a wait must be."""


class Run(Completion):
    """One run of a kernel, started and perhaps still going.

    Attributes
    ----------
    count : elements that it updates.
    """

    count: int

    @property
    @abstractmethod
    def committed(self) -> int:
        """Elements whose every result is known to be in memory, as far as has been seen."""

    @property
    @abstractmethod
    def error(self) -> DeviceError | None:
        """What it failed with, None while it has not."""

    @property
    @abstractmethod
    def cycles(self) -> int | None:
        """Device cycles from START to the end; None while it runs, or without a clock."""

    @property
    @abstractmethod
    def counters(self) -> Mapping[str, int]:
        """Counters of the kernel by name, latched when it ended; empty while it runs."""

    @abstractmethod
    def wait(self, max_cycles: int | None = None) -> Self:
        """Let the device run until this is done, and return self.

        Parameters
        ----------
        max_cycles : bound in device cycles (steps, on a device without a clock). None: enough for
            any memory that moves a beat in 64 cycles.

        Raises
        ------
        ArgumentError : `max_cycles` is no integer, or negative.
        KernelError : the run stopped; says why, where, and what is committed.
        WaitTimeoutError : it neither completed nor stopped in time. It still runs: wait again, or
            abort.
        MemoryFaultError, ProtocolError : an emulated device caught the kernel at something
            forbidden.
        """

    @abstractmethod
    def abort(self, max_cycles: int | None = None) -> None:
        """Stop it: no new access is issued, those outstanding are drained. The device is then idle.

        When memory does not answer, the drain cannot end: then the device is reset hard.
        Either way `error` is an `nearstep.errors.AbortedError` after it.
        """


def check_bound(max_cycles: int | None) -> None:
    """Raise `ArgumentError` unless `max_cycles` can bound a wait."""
    if not is_bound(max_cycles):
        raise ArgumentError(f"max_cycles must be {BOUND}, not {max_cycles!r}")


def is_bound(max_cycles: object) -> bool:
    """Whether `max_cycles` can bound a wait: it is `BOUND`."""
    if is_whole(max_cycles):
        return bool(0 <= max_cycles < MAX_BOUND)
    return max_cycles is None
