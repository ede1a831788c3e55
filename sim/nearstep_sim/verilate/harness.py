"""Interface between Python and the C++ harnesses of simulated devices."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Self

from nearstep.backends.emulated import FAULT_KINDS, Injection
from nearstep.errors import (
    BusyError,
    ClosedDeviceError,
    DeviceError,
    GuardError,
    MemoryFaultError,
    OptionError,
    OutOfRangeError,
    ProtocolError,
    UninitialisedError,
)
from nearstep_sim.verilate.abi import structure

HISTORY_BYTES = 8192

TIMEOUT, FAULTED, HUNG, FAILED = -1, -2, -3, -4
"""Status of a failed call."""

MORE = -5
"""Status of a call that has not ended after the 4,096 cycles that it may take at a time."""

ACCESS_FAULTS: dict[int, tuple[type[MemoryFaultError], str]] = {
    1: (OutOfRangeError, "beyond the end of memory"),
    2: (UninitialisedError, "nobody has written there"),
    3: (GuardError, "a guard is there"),
}


class Simulation:
    """One simulated device of a library, entered for some thousand cycles at a time: in between
    Python sees signals, so that Ctrl-C ends a call within that time.

    The device is closed with its owner.

    Parameters
    ----------
    owner : held by a weak reference.
    name : of the device, for errors.
    close, abandon : functions of the library: end the device; and abandon a call that returned
        `MORE`.
    keep : objects that the device uses.
    at_exit : whether the device is closed at the end of the process too, because it writes a file.
    """

    def __init__(
        self,
        owner: object,
        name: str,
        handle: int,
        close: Callable[[int], None],
        abandon: Callable[[int], None],
        *,
        keep: object = None,
        at_exit: bool = False,
    ) -> None:
        self._name = name
        self._handle: int | None = handle
        self._abandon = abandon
        self._inside = False
        self._end = weakref.finalize(owner, _end, os.getpid(), close, handle, keep)
        self._end.atexit = at_exit

    @property
    def handle(self) -> int:
        """Handle for the functions of the library.

        Raises
        ------
        ClosedDeviceError
        """
        if self._handle is None:
            raise ClosedDeviceError(self._name, "use the simulation")
        return self._handle

    @property
    def is_open(self) -> bool:
        """Whether the device can be used."""
        return self._handle is not None

    def carry_out(self, call: Callable[..., int], *arguments: object) -> int:
        """Run a call of the library to its end, and return its status.

        A call that is interrupted, such as by Ctrl-C, is abandoned: the device can be used, and
        memory may be written in part.

        Raises
        ------
        BusyError : a signal handler calls during another call.
        ClosedDeviceError
        """
        if self._inside:
            raise BusyError(f"{self._name} is in a call that a signal handler has interrupted")
        try:
            self._inside = True
            while (status := call(self.handle, *arguments)) == MORE:
                pass
            return status
        except BaseException:
            if self._handle is not None:
                self._abandon(self._handle)
            raise
        finally:
            self._inside = False

    def close(self) -> None:
        """End the device. Closing twice does nothing."""
        self._handle = None
        self._end()


def _end(process: int, close: Callable[[int], None], handle: int, keep: object) -> None:
    if os.getpid() == process:  # a child after fork() has a copy, whose files are its parent's
        close(handle)


def writable(device: str, option: str, path: str, *names: str) -> None:
    """Make sure that files of an option can be written; their folder is made if need be.

    Parameters
    ----------
    names : the files, `path` itself if none is given. They exist afterwards.

    Raises
    ------
    OptionError
    """
    try:
        if not path:
            raise OSError(None, "a file must be named")
        for name in names or (path,):
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            with open(name, "ab"):
                pass
    except OSError as error:
        raise OptionError(device, option, path, f"cannot be written: {error.strerror}") from None


class CPoll(structure("updater/shell_device.hpp", "Poll")):
    """A condition on a register."""


class FaultRecord(structure("verilate/fault.hpp", "Fault")):
    """Violation of the kernel found by the simulation; kind 0 is none."""

    def error(self, transactions: Sequence[str]) -> DeviceError:
        """The record as an exception."""
        if self.kind in ACCESS_FAULTS:
            kind, reason = ACCESS_FAULTS[self.kind]
            return kind(reason, self.address, write=bool(self.write), transactions=transactions)
        return ProtocolError(
            self.channel.decode(),
            self.rule.decode(),
            self.detail.decode(),
            cycle=self.cycle,
            transactions=transactions,
        )


class CInjection(structure("verilate/injection.hpp", "Injection")):
    """`nearstep.backends.emulated.Injection`."""

    @classmethod
    def of(cls, injection: Injection) -> Self:
        return cls(
            kind=FAULT_KINDS.index(injection.kind),
            write=int(injection.write),
            host=int(injection.host),
            peer=int(injection.peer),
            base=injection.base,
            limit=injection.limit,
            nth=injection.nth,
            times=injection.times,
            delay=injection.delay,
        )
