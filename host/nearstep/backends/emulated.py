"""The base of emulated devices: guards, injected faults and options."""

from __future__ import annotations

import inspect
import os
import threading
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, Self, TypeVar

from nearstep.backends.base import Backend
from nearstep.errors import ArgumentError, ForkedDeviceError
from nearstep.scalars import flag, is_whole

Result = TypeVar("Result")
FaultKind = Literal["slverr", "decerr", "never", "late"]
FAULT_KINDS: tuple[FaultKind, ...] = ("slverr", "decerr", "never", "late")


def _one_at_a_time(method: Callable[..., Result]) -> Callable[..., Result]:
    @wraps(method)
    def locked(self: EmulatedBackend, *args: Any, **options: Any) -> Result:
        if os.getpid() != self._process:  # a thread of the parent process may hold the lock
            raise ForkedDeviceError(f"of the family {self.family}", method.__name__, self._process)
        with self._lock:
            return method(self, *args, **options)

    return locked


@dataclass(frozen=True, kw_only=True)
class Injection:
    """A misbehaviour of the emulated memory.

    An injection hits `times` bursts of one direction that touch [base, limit), from the `nth` such
    burst after the injection on, counted from 0.

    Parameters
    ----------
    kind : `slverr` and `decerr` answer with that response without the access; `never` drops the
        burst, and blocks all later ones of its direction; `late` answers `delay` cycles late.
    write : whether writes are hit, or reads.
    base, limit : byte range, `limit` exclusive.
    delay : cycles, for `late`.
    host : whether accesses of the host are hit, or those of a kernel. Needs a device through which
        the host accesses memory.
    peer : whether accesses of the drive beside the memory are hit instead. Needs a device with a
        drive.
    """

    kind: FaultKind
    write: bool
    base: int = 0
    limit: int = 1 << 63
    nth: int = 0
    times: int = 1
    delay: int = 100_000
    host: bool = False
    peer: bool = False

    def __post_init__(self) -> None:
        if self.kind not in FAULT_KINDS:
            raise ArgumentError(f"kind must be one of {', '.join(FAULT_KINDS)}, not {self.kind!r}")
        flag("write", self.write)
        flag("host", self.host)
        flag("peer", self.peer)
        if self.host and self.peer:
            raise ArgumentError("host or peer must be False: an injection hits one of them")
        for name in ("base", "limit", "nth", "times", "delay"):
            if not is_whole(getattr(self, name)):
                raise ArgumentError(f"{name} must be an integer, not {getattr(self, name)!r}")
        if not 0 <= self.base < self.limit:
            raise ArgumentError(
                f"range must be non-empty and not negative, not [{self.base:#x}, {self.limit:#x})"
            )
        if self.nth < 0 or self.times < 1 or self.delay < 0:
            raise ArgumentError(
                "nth and delay must be at least 0 and times at least 1, "
                f"not {self.nth}, {self.delay} and {self.times}"
            )

    def check_kernels(self) -> None:
        """Raise `ArgumentError` for accesses of the host or a drive, on devices without
        such ports.
        """
        if self.host:
            raise ArgumentError(
                "host must be False: the host does not access this memory by a port"
            )
        self.check_no_peer()

    def check_no_peer(self) -> None:
        """Raise `ArgumentError` for accesses of a drive, on devices without one."""
        if self.peer:
            raise ArgumentError("peer must be False: there is no drive beside this memory")


class EmulatedBackend(Backend):
    """A backend whose memory is emulated, with guards and injected faults.

    Methods may be called from several threads, and are serialised. A child after `fork()` has only
    a copy: there they raise `ForkedDeviceError`.
    """

    capacity_options = "memory_bytes"

    _lock: threading.RLock
    _process: int

    def __init_subclass__(cls) -> None:
        for name, each in list(vars(cls).items()):
            if not name.startswith("_") and inspect.isfunction(each):
                setattr(cls, name, _one_at_a_time(each))

    def __new__(cls, *args: object, **options: object) -> Self:
        made = super().__new__(cls)
        made._lock = threading.RLock()
        made._process = os.getpid()
        return made

    @abstractmethod
    def protect(self, address: int, nbytes: int) -> None:
        """Make [address, address + nbytes) a guard: any access of the kernel there is a fault."""

    @abstractmethod
    def claim(self, address: int, nbytes: int) -> None:
        """Lift the guard from [address, address + nbytes); reads are faults until written."""

    @abstractmethod
    def inject(self, injection: Injection) -> None:
        """Inject a fault of memory. Injections add up until `heal`."""

    @abstractmethod
    def heal(self) -> None:
        """Remove all injections. A dropped burst remains dropped until a reset."""
