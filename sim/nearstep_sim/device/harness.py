"""What the C++ harnesses of the simulated devices share with Python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from typing import Self

from nearstep.backends.emulated import FAULT_KINDS, Injection
from nearstep.errors import (
    DeviceError,
    GuardError,
    MemoryFaultError,
    OptionError,
    OutOfRangeError,
    ProtocolError,
    UninitialisedError,
)

HISTORY_BYTES = 8192

TIMEOUT, FAULTED, HUNG, FAILED = -1, -2, -3, -4
"""Status of a call that did not end as it should."""

ACCESS_FAULTS: dict[int, tuple[type[MemoryFaultError], str]] = {
    1: (OutOfRangeError, "beyond the end of memory"),
    2: (UninitialisedError, "nobody has written there"),
    3: (GuardError, "a guard is there"),
}


def writable(device: str, option: str, path: str, *names: str) -> None:
    """Make sure that files of an option can be written; their folder is made if need be.

    Parameters
    ----------
    names: str
        The files, ``path`` itself if none is given. They exist afterwards.

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


class CPoll(ctypes.Structure):
    """A condition on a register."""

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("mask", ctypes.c_uint32),
        ("value", ctypes.c_uint32),
    )


class FaultRecord(ctypes.Structure):
    """What the simulation has to say against the kernel; kind 0 is nothing."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("write", ctypes.c_int32),
        ("address", ctypes.c_uint64),
        ("cycle", ctypes.c_uint64),
        ("channel", ctypes.c_char * 8),
        ("rule", ctypes.c_char * 48),
        ("detail", ctypes.c_char * 120),
    )

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


class CInjection(ctypes.Structure):
    """:class:`nearstep.backends.emulated.Injection`."""

    _fields_ = (
        ("kind", ctypes.c_int32),
        ("write", ctypes.c_int32),
        ("host", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
        *((name, ctypes.c_uint64) for name in ("base", "limit", "nth", "times", "delay")),
    )

    @classmethod
    def of(cls, injection: Injection) -> Self:
        return cls(
            kind=FAULT_KINDS.index(injection.kind),
            write=int(injection.write),
            host=int(injection.host),
            base=injection.base,
            limit=injection.limit,
            nth=injection.nth,
            times=injection.times,
            delay=injection.delay,
        )
