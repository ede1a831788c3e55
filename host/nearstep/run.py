"""A run of a kernel."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Self

from nearstep.backends.base import Completion
from nearstep.errors import ArgumentError, DeviceError
from nearstep.scalars import is_whole

MAX_BOUND = 1 << 64
"""Bounds of waits are below this: backends count device cycles in 64 bits."""

BOUND = "an integer from 0 to 2**64 - 1, or None"
"""Valid bounds of a wait, in messages."""


class Run(Completion):
    """One run of a kernel, which was started.

    Attributes
    ----------
    count : elements that the run updates.
    """

    count: int

    @property
    @abstractmethod
    def committed(self) -> int:
        """Elements whose every result was in memory when the run was last polled."""

    @property
    @abstractmethod
    def error(self) -> DeviceError | None:
        """The error that the run failed with, or None."""

    @property
    @abstractmethod
    def cycles(self) -> int | None:
        """Device cycles from START to the end; None during the run, or without a clock."""

    @property
    @abstractmethod
    def counters(self) -> Mapping[str, int]:
        """Counters of the kernel by name, latched at the end; empty during the run."""

    @abstractmethod
    def wait(self, max_cycles: int | None = None) -> Self:
        """Advance the device until the run ends, and return self.

        Parameters
        ----------
        max_cycles : bound in device cycles (steps, on a device without a clock). None: enough for
            any memory that moves a beat in 64 cycles.

        Raises
        ------
        ArgumentError : `max_cycles` is no integer, or negative.
        KernelError : the run stopped; the error says why, where, and how much is committed.
        WaitTimeoutError : the run neither completed nor stopped in time, and continues: wait again,
            or abort.
        MemoryFaultError, ProtocolError : the kernel made an access that an emulated device refuses.
        """

    @abstractmethod
    def abort(self, max_cycles: int | None = None) -> None:
        """Stop the run: no new access is issued, outstanding ones are drained, the device is idle.

        If the drain does not end, because memory does not answer, the device is reset hard.
        In both cases `error` is a `nearstep.errors.AbortedError` afterwards.
        """


def check_bound(max_cycles: int | None) -> None:
    """Raise `ArgumentError` unless `max_cycles` can bound a wait."""
    if not is_bound(max_cycles):
        raise ArgumentError(f"max_cycles must be {BOUND}, not {max_cycles!r}")


def is_bound(max_cycles: object) -> bool:
    """Whether `max_cycles` can bound a wait."""
    if is_whole(max_cycles):
        return bool(0 <= max_cycles < MAX_BOUND)
    return max_cycles is None
