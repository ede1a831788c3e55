"""Checks of a run before it accesses memory."""

from typing import Any

from amaranth import Array, Cat, Const, Elaboratable, Module, Mux, ResetInserter, Signal, Value
from amaranth.lib import wiring
from amaranth.lib.wiring import In, Out

from nearstep_hw.axi.window import WindowMatch, window_port
from nearstep_hw.updater.array_lengths import ArrayLengths
from nearstep_hw.updater.fault import CAUSE_WIDTH, RESPONSE_WIDTH, STREAM_WIDTH, FaultLayout
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import ErrorCause, Stream

ADDRESS_WIDTH = 64


class _Condition:
    """Signals of the condition under check.

    Parameters
    ----------
    arrays : number of arrays.
    address_width, length_width : bits of an address, and of an array's bytes.
    windows : number of windows.
    """

    def __init__(self, *, arrays: int, address_width: int, length_width: int, windows: int) -> None:
        self.array = Signal(range(arrays))
        self.other = Signal(range(arrays))  # with OVERLAP: an array before `array`
        self.is_last = Signal()
        self.unused = Signal()
        self.other_unused = Signal()
        self.read = Signal()
        self.written = Signal()
        self.base = Signal(ADDRESS_WIDTH)
        self.length = Signal(length_width)
        self.end = Signal(length_width + 1)
        self.beyond = Signal()  # `base` or `length` exceeds the address width
        # The checks after RANGE can ignore bits beyond the address width.
        self.other_base = Signal(address_width)
        self.other_length = Signal(address_width + 1)
        self.other_end = Signal(address_width + 1)
        found = (Signal() for _ in range(5))
        self.empty, self.aligned, self.in_range, self.apart, self.granted = found
        # The fault, if there is one.
        self.cause = Signal(CAUSE_WIDTH)
        self.stream = Signal(STREAM_WIDTH)
        self.address = Signal(ADDRESS_WIDTH)
        # Registers: operands, ends, comparisons.
        self.wait = 2 + windows
        self.waited = Signal(range(self.wait + 1))
        self.act = Signal()  # the condition is evaluated


class StartCheck(wiring.Component):
    """Checks a run's arrays, one condition a cycle, and finds the first fault.

    In this order: the kernel must have the selected rule, formats and kind of run; then, unless
    `i_count` is 0, every array must start on a beat, every array must end within the memory, no two
    may share bytes, and one window must grant every array in full, in whole beats: the arrays that
    are read for reading, then the arrays that are written for writing. Arrays that the run does not
    have are ignored. A run with a bad array accesses no memory.

    *Timing*: done within 1 + 4 n + n (n - 1) / 2 cycles of `i_start` with n arrays: 23 for
    Adam's. With `config.cut` each condition takes three cycles, and one for each window.

    Parameters
    ----------
    memory_bytes : end of the memory; None: end of the address space.

    Members
    -------
    i_start : starts the checks; the other inputs hold until `o_done`.
    i_address : byte address of each of `operands`.
    i_use : a bit for each array that the run has. If not all runs have all.
    i_count, i_pairs, i_narrow, i_paired : as of `ArrayLengths`; stable before `i_start`.
    i_formats : a rule, format, scale or kind of run is set that the kernel lacks.
    i_copy_out : an address of the copy is set, and the kernel cannot make copies.
    window : the windows, see `window_port`.
    o_done : the checks are over, in this cycle.
    o_fault : with `o_done`, the first fault, or cause 0.
    i_clear : makes the component idle.
    """

    def __init__(self, config: UpdateKernelConfig, *, memory_bytes: int | None = None) -> None:
        self.config = config
        space = 1 << config.address_width
        self.memory_bytes = space if memory_bytes is None else min(memory_bytes, space)
        self.lengths = ArrayLengths(config)
        self.operands = self.lengths.operands
        self.selective = config.selective or tuple(self.operands) != config.arrays
        sizes = {k: v for k, v in self.lengths.signature.members.items() if k.startswith("i_")}
        super().__init__(
            {
                "i_start": In(1),
                "i_address": In(ADDRESS_WIDTH).array(len(self.operands)),
                **({"i_use": In(len(self.operands))} if self.selective else {}),
                **sizes,
                "i_formats": In(1),
                "i_copy_out": In(1),
                "window": window_port(
                    address_width=config.address_width,
                    windows=config.window_count,
                    cut=config.cut,
                ),
                "o_done": Out(1),
                "o_fault": Out(FaultLayout()),
                "i_clear": In(1),
            }
        )

    def elaborate(self, platform: object) -> Elaboratable:
        m = Module()
        m.submodules.match = match = WindowMatch(
            address_width=self.config.address_width,
            windows=self.config.window_count,
            cut=self.config.cut,
        )
        m.submodules.lengths = self.lengths
        now = _Condition(
            arrays=len(self.operands),
            address_width=self.config.address_width,
            length_width=self.lengths.length_width,
            windows=self.config.window_count,
        )
        self._wait(m, now)
        self._connect(m, now, match)
        self._compare(m, now)
        self._look_up(m, now)
        with m.FSM():
            self._check_formats(m, now)
            self._check_places(m, now)
            self._check_windows(m, now, match)
        return ResetInserter(self.i_clear)(m)

    def _wait(self, m: Module, now: _Condition) -> None:
        """Drive `now.act`: the condition is evaluated."""
        if self.config.cut:
            m.d.comb += now.act.eq(now.waited == now.wait)
            m.d.sync += now.waited.eq(Mux(now.act, 0, now.waited + 1))
        else:
            m.d.comb += now.act.eq(1)

    def _connect(self, m: Module, now: _Condition, match: WindowMatch) -> None:
        """Connect the parts and the outputs."""
        width = self.config.address_width
        for name in self.lengths.signature.members:
            if name.startswith("i_"):
                m.d.comb += getattr(self.lengths, name).eq(getattr(self, name))
        for mine, its in zip(self.window, match.window, strict=True):
            for name in its.signature.members:
                m.d.comb += getattr(its, name).eq(getattr(mine, name))
        m.d.comb += [
            now.is_last.eq(now.array == len(self.operands) - 1),
            match.i_start.eq(now.base[:width]),
            match.i_end.eq(now.end[: width + 1]),
            now.granted.eq(match.o_granted),
            now.address.eq(now.base),
            self.o_fault.eq(Cat(now.cause, now.stream, Const(0, RESPONSE_WIDTH), now.address)),
        ]

    def _compare(self, m: Module, now: _Condition) -> None:
        """Evaluate the conditions of `array`, and of `array` with `other`."""
        width = self.config.address_width
        count = len(self.operands)
        use = self.i_use if self.selective else Const((1 << count) - 1, count)
        bases = Array(self.i_address)
        lengths = Array(self.lengths.o_bytes)
        too_long = self.lengths.o_beyond.bit_select(now.array, 1)
        to = m.d.sync if self.config.cut else m.d.comb
        to += [
            now.base.eq(bases[now.array]),
            now.unused.eq(~use.bit_select(now.array, 1)),
            now.other_unused.eq(~use.bit_select(now.other, 1)),
            now.other_base.eq(bases[now.other][:width]),
            now.length.eq(lengths[now.array]),
            now.other_length.eq(lengths[now.other]),
            now.beyond.eq(now.base[width:].any() | too_long),
            now.end.eq(now.base[:width] + now.length),
            now.other_end.eq(now.other_base + now.other_length),
            now.empty.eq(self.i_count == 0),
            now.aligned.eq(now.base % self.config.beat_bytes == 0),
            now.in_range.eq((now.end <= self.memory_bytes) & ~now.beyond),
            now.apart.eq((now.end <= now.other_base) | (now.other_end <= now.base[:width])),
        ]

    def _look_up(self, m: Module, now: _Condition) -> None:
        """Drive stream and accesses of `array`."""
        with m.Switch(now.array):
            for index, operand in enumerate(self.operands.values()):
                with m.Case(index):
                    m.d.comb += [
                        now.stream.eq(operand.stream),
                        now.read.eq(operand.read != Stream.NONE),
                        now.written.eq(operand.write != Stream.NONE),
                    ]

    def _check(self, m: Module, now: _Condition, holds: Value, found: ErrorCause) -> Any:
        """End with `found` unless `holds`; return the context of the other case."""
        with m.If(~holds):
            m.d.comb += [now.cause.eq(found), self.o_done.eq(1)]
            m.next = "IDLE"
        return m.Else()

    def _next_array(self, m: Module, now: _Condition, then: str) -> None:
        m.d.sync += now.array.eq(now.array + 1)
        with m.If(now.is_last):
            m.d.sync += now.array.eq(0)
            m.next = then

    def _check_formats(self, m: Module, now: _Condition) -> None:
        """Start, and check that the kernel has the selected formats and features."""
        with m.State("IDLE"):
            m.d.sync += [now.array.eq(0), now.waited.eq(0)]
            with m.If(self.i_start):
                m.next = "FORMATS"
        with m.State("FORMATS"):
            m.d.sync += now.waited.eq(0)
            m.d.comb += [
                now.stream.eq(Stream.NONE),
                now.address.eq(0),
            ]
            with m.If(~self.i_formats & self.i_copy_out):
                m.d.comb += now.stream.eq(Stream.COPY_OUT)
            holds = ~self.i_formats & ~self.i_copy_out
            with self._check(m, now, holds, ErrorCause.UNSUPPORTED):
                m.next = "ALIGNMENT"
                with m.If(now.empty):
                    m.d.comb += self.o_done.eq(1)
                    m.next = "IDLE"

    def _check_places(self, m: Module, now: _Condition) -> None:
        """Check that each array is in a valid range, and no two overlap."""
        with (
            m.State("ALIGNMENT"),
            m.If(now.act),
            self._check(m, now, now.aligned | now.unused, ErrorCause.ALIGNMENT),
        ):
            self._next_array(m, now, "RANGE")
        with m.State("RANGE"), m.If(now.act):
            m.d.sync += now.other.eq(0)
            with self._check(m, now, now.in_range | now.unused, ErrorCause.ADDRESS_RANGE):
                self._next_array(m, now, "OVERLAP")
                with m.If(now.is_last):
                    m.d.sync += now.array.eq(1)
        with (
            m.State("OVERLAP"),
            m.If(now.act),
            self._check(m, now, now.apart | now.unused | now.other_unused, ErrorCause.OVERLAP),
        ):
            m.d.sync += now.array.eq(now.array + 1)
            with m.If(now.is_last):
                m.d.sync += [now.other.eq(now.other + 1), now.array.eq(now.other + 2)]
                with m.If(now.other == len(self.operands) - 2):
                    m.d.sync += now.array.eq(0)
                    m.next = "READ_WINDOW"

    def _check_windows(self, m: Module, now: _Condition, match: WindowMatch) -> None:
        """Check that windows grant the reads, then the writes."""
        with m.State("READ_WINDOW"):
            m.d.comb += match.i_read.eq(1)
            holds = now.granted | now.unused | ~now.read
            with m.If(now.act), self._check(m, now, holds, ErrorCause.WINDOW):
                self._next_array(m, now, "WRITE_WINDOW")
        with m.State("WRITE_WINDOW"):
            m.d.comb += match.i_write.eq(1)
            with m.Switch(now.array):
                for index, operand in enumerate(self.operands.values()):
                    with m.Case(index):
                        m.d.comb += now.stream.eq(operand.write)
            holds = now.granted | now.unused | ~now.written
            with m.If(now.act), self._check(m, now, holds, ErrorCause.WINDOW):
                m.d.comb += self.o_done.eq(now.is_last)
                self._next_array(m, now, "IDLE")
