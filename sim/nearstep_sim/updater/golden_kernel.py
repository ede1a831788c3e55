"""Functional model of the update kernel: registers and results of the RTL, but no cycles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden.blockwise import Blockwise, pack, unpack
from nearstep_sim.golden.rounding import Draw
from nearstep_sim.golden.rule import SparseGradient
from nearstep_sim.golden.scan import scan
from nearstep_sim.models.memory import EmulatedMemory
from nearstep_sim.updater.golden_command import Command
from nearstep_sim.updater.golden_pairs import GoldenPairs, GoldenRecords, Taken
from nearstep_sim.updater.golden_port import Fault, GoldenPort, Span, StoppedError
from nearstep_spec.blockwise import SIGNED
from nearstep_spec.csr.model import NamedValue
from nearstep_spec.fp import BF16, FP16, FpFormat
from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.updater.config import COPY_OUT, UpdateKernelConfig
from nearstep_spec.updater.registers import (
    Compression,
    ErrorCause,
    Stream,
    counters,
)

Floats = NDArray[np.float32]


class Quantize(Protocol):
    """Quantizes float32 of shape (n,) to 8 bits."""

    def __call__(self, values: Floats, *, signed: bool) -> Blockwise: ...


class Dequantize(Protocol):
    """Converts 8 bits to float32 of shape (n,)."""

    def __call__(self, given: Blockwise, *, signed: bool) -> Floats: ...


class Engine(Protocol):
    """The arithmetic of one rule, and conversions between binary32 and other formats: 16 bits, to
    nearest even, bfloat16 also stochastically, and 8 bits with a scale for each group.

    Attributes
    ----------
    in_place : None, or updates binary32 states in parts, of shape (parts, 1 + arrays): elements of
        a part, and its address in this process for each array.
    """

    in_place: Callable[[NDArray[np.int64], Mapping[str, float]], None] | None

    widen: Callable[[NDArray[np.uint16], FpFormat], Floats]
    narrow: Callable[[Floats, FpFormat], NDArray[np.uint16]]
    round: Callable[[Floats, Draw], NDArray[np.uint16]]
    quantize: Quantize
    dequantize: Dequantize

    def __call__(self, arrays: Mapping[str, Floats], scalars: Mapping[str, float]) -> None:
        """Update the states in place."""

    def of_pairs(
        self,
        arrays: Mapping[str, Floats],
        scalars: Mapping[str, float],
        gradient: SparseGradient,
    ) -> None:
        """Update the states in place, by a gradient of pairs."""


CONVERTED = 1 << 17
"""Elements that are converted at a time."""

FORMATS = {"fp16": FP16, "bf16": BF16}


class GoldenKernel:
    """The kernel behind the registers, advanced in steps of whole blocks.

    Parameters
    ----------
    engines : one for each rule.
    value : configuration fields by `register.field`.
    log : takes a line for each burst.
    end : largest end address of arrays; None: that of the address space.
    before_write : called before bytes are written: address, size.

    Attributes
    ----------
    port : a `GoldenPort`.
    ends : number of runs that have ended.
    fault : first error of the run, a `Fault`; its cause is NONE while there is none.
    found_inf, sum_of_squares : outcome of a scan, the sum as a pattern of binary64.
    """

    def __init__(
        self,
        config: UpdateKernelConfig,
        memory: EmulatedMemory,
        engines: Sequence[Engine],
        value: Callable[[str], int],
        log: Callable[[str], None],
        end: int | None = None,
        before_write: Callable[[int, int], None] | None = None,
    ) -> None:
        self.config = config
        self._before_write = before_write
        self._end = 1 << config.address_width if end is None else end
        self.port = GoldenPort(config, memory, log)
        self._memory = memory
        self._engines = engines
        self._value = value
        self.ends = 0
        self.reset()

    def reset(self) -> None:
        """Return to idle, with no access outstanding and no outcome."""
        self.port.reset()
        self._clear()

    def _clear(self) -> None:
        self.port.begin()
        self.busy = False
        self.done = False
        self.fault = Fault(ErrorCause.NONE)
        self.found_inf = 0
        self.sum_of_squares = 0
        self._counters = dict.fromkeys(counters(self.config), 0)
        self._aborted = False
        self._pairs: GoldenPairs | None = None
        self._scanned = 0
        self._then: Callable[[], None] = self._nothing

    @property
    def counters(self) -> Mapping[str, int]:
        """Counters by name; those of cycles are 0."""
        return {**self._counters, **self.port.beats}

    @property
    def can_advance(self) -> bool:
        """Whether more steps can change anything."""
        return self.busy and not self.port.stuck

    def start(self) -> None:
        """START: check the configuration, then be busy, unless refused or with nothing to do."""
        self._clear()
        self._command = command = Command.read(self.config, self._value)
        fault = command.first_fault(self._end)
        if fault is not None:
            self.fault = fault
        if fault is not None or not command.count:
            self._finish()
            return
        self._areas = command.areas()
        if not command.scans:
            self._prepare(command)
        self.busy = True  # last: after a Ctrl-C before this line no run has started

    def _prepare(self, command: Command) -> None:
        """Prepare the inputs of an update."""
        if command.form != Compression.NONE:
            kind = GoldenPairs if self.config.decompressor is None else GoldenRecords
            self._pairs = kind(command, self._areas, self.port)
        rule = command.chosen
        self._engine = self._engines[command.rule]
        bits = np.array([self._value(f"{name}.value") for name in rule.scalars], np.uint32)
        self._scalars = {
            **dict(zip(rule.scalars, bits.view(np.float32).tolist(), strict=True)),
            **{name: self._value(f"mode.{name}") for name in rule.switches},
        }

    def abort(self) -> None:
        """ABORT: the run ends with the step after this one, if memory answers."""
        self._aborted = self.busy

    def abort_now(self) -> None:
        """End a busy run at once, as ABORT unless it was done: part of a step may be written."""
        if self.busy:
            if not self.done and self.fault.cause is ErrorCause.NONE:
                self.fault = Fault(ErrorCause.ABORTED)
            self._finish()

    def advance(self, elements: int) -> None:
        """Run one step: whole blocks up to `elements`, at least one; or the check of all indices.

        Raises
        ------
        MemoryFaultError
        """
        if not self.can_advance:
            return
        if self.port.late:
            self.port.late -= 1
            if not self.port.late:
                self._then()
            return
        if self._aborted:
            self.fault = Fault(ErrorCause.ABORTED)
            self._finish()
            return
        block = self.config.block_elements
        blocks = 1 if self.port.injections else max(1, elements // block)
        try:
            self._then = self._step(blocks * block)
        except StoppedError as stopped:
            if stopped.fault is not None:
                self.fault = stopped.fault
                self._finish()
            return
        if not self.port.late:
            self._then()

    def _step(self, elements: int) -> Callable[[], None]:
        """Move and compute; return the rest of the work, to be done when memory has responded."""
        if self._command.scans:
            return self._scan(elements)
        if self._pairs is not None and not self._pairs.checked:
            self._pairs.check()
            return self._nothing
        return self._update(elements)

    def _finish(self) -> None:
        self.done = self.fault.cause is ErrorCause.NONE
        self.ends += 1
        self.busy = False  # last: a run that was interrupted before has not ended

    def _nothing(self) -> None:
        pass

    def _scan(self, elements: int) -> Callable[[], None]:
        """Read the next gradients; with the last, the outcome."""
        count, width = self._command.count, self._command.bytes_of(GRADIENT)
        g = self._areas[GRADIENT]
        size = min(elements, count - self._scanned)
        span = Span(g.read, g.base + self._scanned * width, size * width)
        if not self.port.pass_freely([span], []):
            self.port.read(span)
        self._scanned += size
        return self._nothing if self._scanned < count else self._tell_scan

    def _tell_scan(self) -> None:
        g = self._areas[GRADIENT]
        found, total = scan(self._floats(GRADIENT, g.base, g.nbytes), lanes=self.config.lanes)
        bits = np.array(np.nan if np.isnan(total) else total, np.float64).view(np.uint64)
        self.found_inf, self.sum_of_squares = int(found), int(bits)
        self._finish()

    def _update(self, elements: int) -> Callable[[], None]:
        """Read, compute and write the next elements."""
        first = self._counters["committed"]
        size = min(elements, self._command.count - first)
        pairs, rule = self._pairs, self._command.chosen
        names = [name for name in rule.arrays_in if pairs is None or name != GRADIENT]
        reads = {name: self._span(name, self._areas[name].read, first, size) for name in names}
        writes = {
            name: self._span(name, self._areas[name].write, first, size) for name in rule.arrays_out
        }
        if COPY_OUT in self._areas:
            writes[COPY_OUT] = self._span(COPY_OUT, Stream.COPY_OUT, first, size)
        of_pairs = [] if pairs is None else pairs.spans(first + size)
        for span in writes.values():
            self._memory.settle(span.address, span.nbytes, all_loans=False)
            if self._before_write is not None:
                self._before_write(span.address, span.nbytes)
        if self.port.pass_freely([*reads.values(), *of_pairs], list(writes.values())):
            if self._is_done_in_place(reads, writes, size):
                return lambda: self._commit(size)
            taken = self._take_pairs(first, size)
            for at, count in self._joined(names, first, size):
                spans = {name: self._span(name, Stream.NONE, at, count) for name in names}
                arrays = {n: self._floats(n, s.address, s.nbytes) for n, s in spans.items()}
                self._compute(arrays, at, taken)
                for name in writes:
                    target = spans.get(name) or self._span(name, Stream.NONE, at, count)
                    if not self._is_in_place(name, target):
                        self._memory.write(target.address, self._stored(name, arrays, at))
        else:
            for span in (*reads.values(), *of_pairs):
                self.port.read(span)
            arrays = {
                name: self._floats(name, span.address, span.nbytes).copy()
                for name, span in reads.items()
            }
            self._compute(arrays, first, self._take_pairs(first, size))
            for name, span in writes.items():
                self.port.write(span, self._stored(name, arrays, first))
        return lambda: self._commit(size)

    def _is_done_in_place(
        self, reads: Mapping[str, Span], writes: Mapping[str, Span], size: int
    ) -> bool:
        """Update elements by one call of the engine, if it can: arrays are binary32, in memory of
        the device or of the host; return whether that was done."""
        work, formats = self._engine.in_place, set(map(self._command.format_of, writes | reads))
        if work is None or self._pairs is not None or formats != {"fp32"}:
            return False
        parts = self._memory.places([span.address for span in reads.values()], 4 * size)
        if (parts % 4).any():
            return False
        parts[:, 0] //= 4
        work(parts, self._scalars)
        return True

    def _take_pairs(self, first: int, size: int) -> Taken | None:
        """Return the pairs of these elements, if gradients are pairs."""
        if self._pairs is None:
            return None
        taken = self._pairs.take(first, size)
        self._counters["duplicates"] += taken.duplicates
        return taken

    def _compute(self, arrays: Mapping[str, Floats], first: int, taken: Taken | None) -> None:
        """Update arrays that begin with element `first`."""
        if taken is None:
            self._engine(arrays, self._scalars)
        else:
            gradient = taken.part(first, next(iter(arrays.values())).size)
            self._engine.of_pairs(arrays, self._scalars, gradient)

    def _stored(self, name: str, arrays: Mapping[str, Floats], first: int) -> NDArray[np.uint8]:
        """Return the bytes in memory of an array that begins with element `first`."""
        form = self._command.format_of(name)
        values = arrays["p" if name == COPY_OUT else name]
        draw = self._command.draw_of(name, first)
        if draw is not None:
            return np.asarray(self._engines[0].round(values, draw)).view(np.uint8)
        if form in FORMATS:
            return np.asarray(self._engines[0].narrow(values, FORMATS[form])).view(np.uint8)
        if form in SIGNED:
            layout = self.config.block_layout
            made = self._engines[0].quantize(values, signed=SIGNED[form])
            return pack(made, elements=layout.elements, scale_bytes=layout.scale_bytes)
        return values.view(np.uint8)

    def _joined(self, names: Sequence[str], first: int, size: int) -> Iterator[tuple[int, int]]:
        """Split elements [first, first + size) into parts in which each array is contiguous, in
        memory of the device or of the host.

        If an array is not fp32, parts have at most `CONVERTED` elements, which fit the cache. With
        arrays in 8 bits, which are always copied, parts are whole blocks: each block in which
        another array is not contiguous is a part.
        """
        forms = {name: self._command.format_of(name) for name in names}
        whole = self.config.block_elements if SIGNED.keys() & set(forms.values()) else 1
        edges = {first, first + size}
        if set(forms.values()) != {"fp32"}:
            edges.update(range(first, first + size, CONVERTED))
        for name in names:
            if forms[name] in SIGNED:
                continue
            span = self._span(name, Stream.NONE, first, size)
            bytes_of_part = span.nbytes // size * whole
            for border in self._memory.borders(span.address, span.nbytes):
                parts, rest = divmod(border - span.address, bytes_of_part)
                edges.add(first + parts * whole)
                edges.add(first + min(size, (parts + bool(rest)) * whole))
        return ((start, stop - start) for start, stop in pairwise(sorted(edges)))

    def _is_in_place(self, name: str, span: Span) -> bool:
        """Whether `_floats` of a span is the memory itself, of the device or of the host."""
        plain = self._command.format_of(name) == "fp32"
        return plain and not self._memory.borders(span.address, span.nbytes)

    def _commit(self, size: int) -> None:
        self._counters["committed"] += size
        if self._counters["committed"] == self._command.count:
            self._finish()

    def _span(self, name: str, stream: NamedValue, first: int, size: int) -> Span:
        """Elements [first, first + size) of an array."""
        begin, end = self._command.extent(name, first, size)
        return Span(stream, self._areas[name].base + begin, end - begin)

    def _floats(self, name: str, address: int, nbytes: int) -> Floats:
        """Elements of an array as the functional units see them; binary32 in place."""
        data, form = self._memory.view(address, nbytes), self._command.format_of(name)
        if form in FORMATS:
            return self._engines[0].widen(data.view(np.uint16), FORMATS[form])
        if form in SIGNED:
            layout = self.config.block_layout
            given = unpack(data, elements=layout.elements, scale_bytes=layout.scale_bytes)
            return self._engines[0].dequantize(given, signed=SIGNED[form])
        return data.view(np.float32)
