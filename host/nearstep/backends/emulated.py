"""What emulated devices have in common: guards, injected faults and options."""

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
        if os.getpid() != self._process:  # the lock may be that of a thread which is not here
            raise ForkedDeviceError(f"of the family {self.family}", method.__name__, self._process)
        with self._lock:
            return method(self, *args, **options)

    return locked


@dataclass(frozen=True, kw_only=True)
class Injection:
    """A misbehaviour of the emulated memory.

    It hits bursts of one direction that touch [base, limit), from the `nth` such burst on
    (counted from 0, since the injection was made), `times` of them.

    Parameters
    ----------
    kind : `slverr` and `decerr` answer with that response and do not carry out the access; `never`
        swallows the burst, and all later ones of its direction wait behind it; `late` answers
        `delay` cycles late.
    write : whether writes are hit, or reads.
    base, limit : byte range, `limit` exclusive.
    delay : cycles, for `late`.
    host : whether accesses of the host are hit, or those of a kernel. Only where the host reaches
        the memory through the device.
    peer : whether accesses of the drive beside the memory are hit, in their place. Only where the
        device has one.
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
        """Raise `ArgumentError` if accesses of the host or a drive are to be hit: for devices
        through which these do not reach memory."""
        if self.host:
            raise ArgumentError("host must be False: the host does not reach this memory by a port")
        self.check_no_peer()

    def check_no_peer(self) -> None:
        """Raise `ArgumentError` if accesses of a drive are to be hit: for devices without."""
        if self.peer:
            raise ArgumentError("peer must be False: there is no drive beside this memory")


class EmulatedBackend(Backend):
    """A backend whose memory is emulated: it can be guarded, and told to misbehave.

    Its methods may be called from several threads; one is carried out at a time. A child after
    `fork()` has only a copy of it: there they raise `ForkedDeviceError`.
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
        """Make the memory misbehave. Injections add up until `heal`."""

    @abstractmethod
    def heal(self) -> None:
        """Forget all injections. A burst already swallowed stays swallowed until a reset."""
