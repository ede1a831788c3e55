"""Functional model of the Adam kernel: same registers and results as the RTL, but no cycles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.emulated import Injection
from nearstep.errors import (
    GuardError,
    OutOfRangeError,
    UninitialisedError,
)
from nearstep_hw.axdimm.config import ELEMENT_BYTES, HALF_BYTES, AdamKernelConfig
from nearstep_hw.axdimm.registers import COUNTERS, ErrorCause, GradientFormat, Stream
from nearstep_hw.fp.format import BF16, FP16
from nearstep_hw.rule.scale import GRADIENT
from nearstep_sim.device.memory import WRITTEN, EmulatedMemory
from nearstep_sim.golden import fp

Floats = NDArray[np.float32]
Engine = Callable[[Mapping[str, Floats], Mapping[str, float]], None]
"""Updates the states of one rule in place, from its arrays and the scalars."""

RESPONSES = {"slverr": 2, "decerr": 3}
HALVES = {GradientFormat.FP16: FP16, GradientFormat.BF16: BF16}


@dataclass
class ArmedInjection:
    """An injection and how far it has been used up."""

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


class _StoppedError(Exception):
    """The run cannot go on: an error response."""


class GoldenAdamKernel:
    """The kernel behind the registers, advanced in steps of whole blocks.

    Parameters
    ----------
    config: AdamKernelConfig
    memory: EmulatedMemory
    engines: Sequence[Engine]
        One for each rule.
    value: Callable[[str], int]
        Configuration fields by ``register.field``.
    log: Callable[[str], None]
        Takes a line for each burst.
    end: int | None
        Where arrays must end at the latest; None is the address space.
    """

    def __init__(
        self,
        config: AdamKernelConfig,
        memory: EmulatedMemory,
        engines: Sequence[Engine],
        value: Callable[[str], int],
        log: Callable[[str], None],
        end: int | None = None,
    ) -> None:
        self.config = config
        self._end = 1 << config.address_width if end is None else end
        self.memory = memory
        self.injections: list[ArmedInjection] = []
        self._engines = engines
        self._value = value
        self._log = log
        self.reset()

    def reset(self) -> None:
        """Idle, with nothing outstanding and no outcome."""
        self.stuck = False
        self._clear()

    def _clear(self) -> None:
        self.busy = False
        self.done = False
        self.cause = ErrorCause.NONE
        self.stream = Stream.NONE
        self.response = 0
        self.address = 0
        self.late = 0
        self.counters = dict.fromkeys(COUNTERS, 0)
        self._aborted = False
        self._pending = 0

    @property
    def can_advance(self) -> bool:
        """Whether more steps can change anything."""
        return self.busy and not self.stuck

    def start(self) -> None:
        """START: check the configuration, then be busy, unless refused or with nothing to do."""
        self._clear()
        self._count = self._value("count.value")
        self._windows = self._granted()
        rules = self.config.rule_set.rules
        index = self._value("rule.value") if len(rules) > 1 else 0
        if index >= len(rules):
            self._fail(ErrorCause.UNSUPPORTED, Stream.NONE, 0)
            self._finish()
            return
        rule, self._engine = rules[index], self._engines[index]
        self._reads = {name: Stream[f"{name.upper()}_READ"] for name in rule.arrays_in}
        self._writes = {name: Stream[f"{name.upper()}_WRITE"] for name in rule.arrays_out}
        self._base = {name: self._value(f"{name}_address.value") for name in rule.arrays_in}
        self._gradient = self._value("formats.gradient")
        bits = np.array([self._value(f"{name}.value") for name in rule.scalars], np.uint32)
        self._scalars = {
            **dict(zip(rule.scalars, bits.view(np.float32).tolist(), strict=True)),
            **{name: self._value(f"mode.{name}") for name in rule.switches},
        }
        self._check_configuration()
        if self.cause is ErrorCause.NONE and self._count:
            self.busy = True
        else:
            self._finish()

    def abort(self) -> None:
        """ABORT: the run ends with the step after this one, if memory answers."""
        self._aborted = self.busy

    def advance(self, elements: int) -> None:
        """One step: whole blocks up to ``elements``, at least one.

        Raises
        ------
        MemoryFaultError
        """
        if not self.can_advance:
            return
        if self.late:
            self.late -= 1
            if not self.late:
                self._commit(self._pending)
            return
        if self._aborted:
            self._fail(ErrorCause.ABORTED, Stream.NONE, 0)
            self._finish()
            return
        block = self.config.block_elements
        first = self.counters["committed"]
        blocks = 1 if self.injections else max(1, elements // block)
        size = min(blocks * block, self._count - first)
        try:
            self._update(first, size)
        except _StoppedError:
            self._finish()
            return
        self._pending = size
        if not (self.stuck or self.late):
            self._commit(size)

    def _commit(self, size: int) -> None:
        self.counters["committed"] += size
        if self.counters["committed"] == self._count:
            self._finish()

    def _finish(self) -> None:
        self.busy = False
        self.done = self.cause is ErrorCause.NONE

    def _fail(self, cause: ErrorCause, stream: Stream, address: int, response: int = 0) -> None:
        if self.cause is ErrorCause.NONE:
            self.cause, self.stream = cause, stream
            self.address, self.response = address, response

    def _check_configuration(self) -> None:
        config = self.config
        formats = {GradientFormat[name.upper()] for name in config.gradient_formats}
        scaled = self._value("gradient_scale.value") and not config.gradient_scale
        if self._gradient not in formats or self._value("formats.copy_out") or scaled:
            return self._fail(ErrorCause.UNSUPPORTED, Stream.NONE, 0)
        if self._value("copy_out_address.value"):
            return self._fail(ErrorCause.UNSUPPORTED, Stream.COPY_OUT, 0)
        if not self._count:
            return None
        nbytes = {name: self._bytes(name, self._count) for name in self._base}
        for name, base in self._base.items():
            if base % config.beat_bytes:
                return self._fail(ErrorCause.ALIGNMENT, self._reads[name], base)
        for name, base in self._base.items():
            if base + nbytes[name] > self._end:
                return self._fail(ErrorCause.ADDRESS_RANGE, self._reads[name], base)
        names = list(self._base)
        for i, first in enumerate(names):
            for second in names[i + 1 :]:
                low, high = sorted((first, second), key=lambda name: self._base[name])
                if self._base[low] + nbytes[low] > self._base[high]:
                    return self._fail(ErrorCause.OVERLAP, self._reads[second], self._base[second])
        for streams, write in ((self._reads, False), (self._writes, True)):
            for name, stream in streams.items():
                base = self._base[name]
                if not self._permitted(base, self._whole(base + nbytes[name]), write):
                    return self._fail(ErrorCause.WINDOW, stream, base)
        return None

    def _granted(self) -> Sequence[tuple[int, int, bool, bool]]:
        names = [f"window{i}" for i in range(self.config.windows)]
        return [
            (
                self._value(f"{name}_base.value"),
                self._value(f"{name}_limit.value"),
                bool(self._value(f"{name}_permissions.read")),
                bool(self._value(f"{name}_permissions.write")),
            )
            for name in names
            if self._value(f"{name}_permissions.valid")
        ]

    def _update(self, first: int, size: int) -> None:
        """Read, compute and write elements [first, first + size)."""
        nbytes = {name: self._bytes(name, size) for name in self._base}
        start = {name: base + self._bytes(name, first) for name, base in self._base.items()}
        if self._unobstructed(start, nbytes):
            self._engine(
                {name: self._array(name, at, nbytes[name]) for name, at in start.items()},
                self._scalars,
            )
            for counter, streams in (("read_beats", self._reads), ("write_beats", self._writes)):
                self.counters[counter] += sum(self._beats(nbytes[name]) for name in streams)
            return
        arrays = {}
        for name, stream in self._reads.items():
            for address, limit in self._bursts(start[name], nbytes[name]):
                if not self._access(stream, address, limit, write=False):
                    return
            arrays[name] = self._array(name, start[name], nbytes[name]).copy()
        self._engine(arrays, self._scalars)
        for name, stream in self._writes.items():
            data = arrays[name].view(np.uint8)
            for address, limit in self._bursts(start[name], nbytes[name]):
                if not self._access(stream, address, limit, write=True):
                    return
                offset = address - start[name]
                self.memory.write(address, data[offset : offset + limit - address])

    def _access(self, stream: Stream, address: int, limit: int, *, write: bool) -> bool:
        """One burst. False if memory swallowed it.

        Raises
        ------
        _StoppedError, MemoryFaultError
        """
        self._log(f"{'write' if write else 'read'} {stream.name} {address:#x}..{limit:#x}")
        for armed in self.injections:
            if not armed.hits(write, address, limit):
                continue
            kind = armed.injection.kind
            if kind in RESPONSES:
                cause = ErrorCause.WRITE_RESPONSE if write else ErrorCause.READ_RESPONSE
                self._fail(cause, stream, address, RESPONSES[kind])
                raise _StoppedError
            if kind == "never":
                self.stuck = True
                return False
            self.late += armed.injection.delay
        self._check_memory(address, limit, write=write)
        beats = self._beats(limit - address)
        self.counters["write_beats" if write else "read_beats"] += beats
        return True

    def _check_memory(self, address: int, limit: int, *, write: bool) -> None:
        capacity = self.memory.data.size
        if self._whole(limit) > capacity:
            reason = f"beyond the end of memory at {capacity:#x}"
            raise OutOfRangeError(reason, max(address, capacity), write=write)
        guard = self.memory.first_guard(address, limit - address)
        if guard is not None:
            raise GuardError("a guard is there", guard, write=write)
        if not write:
            unwritten = self.memory.first_not(WRITTEN, address, limit - address)
            if unwritten is not None:
                raise UninitialisedError("nobody has written there", unwritten, write=write)

    def _unobstructed(self, start: Mapping[str, int], nbytes: Mapping[str, int]) -> bool:
        """Whether a step can be done in place, because nothing in its way can stop it."""
        return not self.injections and all(
            self._whole(at + nbytes[name]) <= self.memory.data.size
            and self.memory.first_not(WRITTEN, at, nbytes[name]) is None
            for name, at in start.items()
        )

    def _permitted(self, address: int, limit: int, write: bool) -> bool:
        return any(
            base <= address and limit <= end and (may_write if write else may_read)
            for base, end, may_read, may_write in self._windows
        )

    def _bursts(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """Bursts of a range: they end where burst_bytes divides the address, or with the range."""
        end, size = address + nbytes, self.config.burst_bytes
        while address < end:
            limit = min(end, address - address % size + size)
            yield address, limit
            address = limit

    def _beats(self, nbytes: int) -> int:
        return -(-nbytes // self.config.beat_bytes)

    def _whole(self, limit: int) -> int:
        """``limit``, rounded up to a whole beat."""
        return self._beats(limit) * self.config.beat_bytes

    def _bytes(self, name: str, elements: int) -> int:
        """Bytes of some elements of an array."""
        narrow = name == GRADIENT and self._gradient != GradientFormat.FP32
        return elements * (HALF_BYTES if narrow else ELEMENT_BYTES)

    def _array(self, name: str, address: int, nbytes: int) -> Floats:
        """Elements of an array as the functional units see them; those of a state in place."""
        data = self.memory.data[address : address + nbytes]
        if name == GRADIENT and self._gradient != GradientFormat.FP32:
            return fp.widen32(data.view(np.uint16), HALVES[GradientFormat(self._gradient)])
        return data.view(np.float32)
