"""Port of the functional kernel to its memory: bursts, and injected faults of bursts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.emulated import Injection
from nearstep.errors import GuardError, OutOfRangeError, UninitialisedError
from nearstep_sim.models.memory import WRITTEN, EmulatedMemory
from nearstep_spec.csr.model import NamedValue
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import ErrorCause, Stream

RESPONSES = {"slverr": 2, "decerr": 3}


@dataclass
class ArmedInjection:
    """An injection and its progress."""

    injection: Injection
    seen: int = 0
    left: int = field(init=False)

    def __post_init__(self) -> None:
        self.left = self.injection.times

    def hits(self, write: bool, address: int, limit: int) -> bool:
        """Whether the burst [address, limit) is hit; counts it."""
        rule = self.injection
        if write != rule.write or limit <= rule.base or address >= rule.limit or not self.left:
            return False
        self.seen += 1
        if self.seen <= rule.nth:
            return False
        self.left -= 1
        return True


@dataclass(frozen=True)
class Fault:
    """Error registers of a fault."""

    cause: ErrorCause
    stream: NamedValue = Stream.NONE
    address: int = 0
    response: int = 0


class StoppedError(Exception):
    """A burst failed.

    Parameters
    ----------
    fault : None if memory never responds.
    """

    def __init__(self, fault: Fault | None) -> None:
        super().__init__(fault)
        self.fault = fault


@dataclass(frozen=True)
class Span:
    """A range of memory that a stream reads or writes."""

    stream: NamedValue
    address: int
    nbytes: int


class GoldenPort:
    """Transfers spans in bursts, as the kernel does.

    Parameters
    ----------
    log : takes a line for each burst.

    Attributes
    ----------
    stuck : memory never responds to a burst: the port hangs until a reset.
    late : steps by which responses are late.
    beats : counters, by name, of the run.
    """

    def __init__(
        self, config: UpdateKernelConfig, memory: EmulatedMemory, log: Callable[[str], None]
    ) -> None:
        self.memory = memory
        self.injections: list[ArmedInjection] = []
        self._beat_bytes = config.beat_bytes
        self._burst_bytes = config.burst_bytes
        self._log = log
        self.reset()

    def reset(self) -> None:
        """Drop all outstanding bursts."""
        self.stuck = False
        self.begin()

    def begin(self) -> None:
        """Begin a run: clear its counters."""
        self.late = 0
        self.beats = {"read_beats": 0, "write_beats": 0}

    def pass_freely(self, reads: Sequence[Span], writes: Sequence[Span]) -> bool:
        """Return whether no burst of these spans can fail; if so, count their beats.

        The caller then reads and writes the memory itself.
        """
        if self.injections:
            return False
        for span in (*reads, *writes):
            if self.whole(span.address + span.nbytes) > self.memory.data.size:
                return False
        if any(self.memory.first_not(WRITTEN, s.address, s.nbytes) is not None for s in reads):
            return False
        read = {(span.address, span.nbytes) for span in reads}
        others = [span for span in writes if (span.address, span.nbytes) not in read]
        if any(self.memory.first_guard(s.address, s.nbytes) is not None for s in others):
            return False  # lines that are read have been written, so they are no guards
        self.beats["read_beats"] += sum(self.beats_of(span.nbytes) for span in reads)
        self.beats["write_beats"] += sum(self.beats_of(span.nbytes) for span in writes)
        return True

    def read(self, span: Span) -> None:
        """Check and count the bursts of a read; the caller takes the contents from memory.

        Raises
        ------
        StoppedError, MemoryFaultError
        """
        for address, limit in self._bursts(span):
            self._access(span.stream, address, limit, write=False)

    def write(self, span: Span, data: NDArray[np.uint8]) -> None:
        """Write `data` to a span.

        Raises
        ------
        StoppedError, MemoryFaultError
        """
        for address, limit in self._bursts(span):
            self._access(span.stream, address, limit, write=True)
            self.memory.write(address, data[address - span.address : limit - span.address])

    def beats_of(self, nbytes: int) -> int:
        """Beats of some bytes."""
        return -(-nbytes // self._beat_bytes)

    def whole(self, limit: int) -> int:
        """`limit`, rounded up to a whole beat."""
        return self.beats_of(limit) * self._beat_bytes

    def _bursts(self, span: Span) -> Iterator[tuple[int, int]]:
        """Bursts of a span: they end where burst_bytes divides the address, or with the span."""
        address, end, size = span.address, span.address + span.nbytes, self._burst_bytes
        while address < end:
            limit = min(end, address - address % size + size)
            yield address, limit
            address = limit

    def _access(self, stream: NamedValue, address: int, limit: int, *, write: bool) -> None:
        self._log(f"{'write' if write else 'read'} {stream.name} {address:#x}..{limit:#x}")
        for armed in self.injections:
            if not armed.hits(write, address, limit):
                continue
            kind = armed.injection.kind
            if kind in RESPONSES:
                cause = ErrorCause.WRITE_RESPONSE if write else ErrorCause.READ_RESPONSE
                raise StoppedError(Fault(cause, stream, address, RESPONSES[kind]))
            if kind == "never":
                self.stuck = True
                raise StoppedError(None)
            self.late += armed.injection.delay
        self._check_memory(address, limit, write=write)
        self.beats["write_beats" if write else "read_beats"] += self.beats_of(limit - address)

    def _check_memory(self, address: int, limit: int, *, write: bool) -> None:
        capacity = self.memory.data.size
        if self.whole(limit) > capacity:
            reason = f"beyond the end of memory at {capacity:#x}"
            raise OutOfRangeError(reason, max(address, capacity), write=write)
        guard = self.memory.first_guard(address, limit - address)
        if guard is not None:
            raise GuardError("a guard is there", guard, write=write)
        if not write:
            unwritten = self.memory.first_not(WRITTEN, address, limit - address)
            if unwritten is not None:
                raise UninitialisedError("nobody has written there", unwritten, write=write)
