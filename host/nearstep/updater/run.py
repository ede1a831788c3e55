"""Runs of the update kernel."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Self

import numpy as np

from nearstep.backends.base import Backend, Poll
from nearstep.buffer import Buffer
from nearstep.errors import (
    AbortedError,
    BusResponseError,
    BusyError,
    ConfigurationError,
    DeviceError,
    KernelError,
    MemoryFaultError,
    ModeError,
    PairError,
    PairOrderError,
    PairRangeError,
    ProtocolError,
    WaitTimeoutError,
    WindowError,
)
from nearstep.registers import BlockRegisters
from nearstep.run import Run, check_bound
from nearstep.updater.turns import CommandLock
from nearstep_spec.csr.model import Access
from nearstep_spec.updater.config import INDEX
from nearstep_spec.updater.registers import ErrorCause

SLOWEST_CYCLES_PER_BEAT = 64
"""Mean cycles of a beat over a run beyond which memory counts as hung."""

IDLE_CYCLES = 10_000
"""Bound of a command that transfers no data: latencies, and the drain of an abort."""

ERRORS: Mapping[ErrorCause, type[KernelError]] = MappingProxyType(
    {
        ErrorCause.READ_RESPONSE: BusResponseError,
        ErrorCause.WRITE_RESPONSE: BusResponseError,
        ErrorCause.WINDOW: WindowError,
        ErrorCause.ALIGNMENT: ConfigurationError,
        ErrorCause.ADDRESS_RANGE: ConfigurationError,
        ErrorCause.UNSUPPORTED: ConfigurationError,
        ErrorCause.OVERLAP: ConfigurationError,
        ErrorCause.ABORTED: AbortedError,
        ErrorCause.PAIR_RANGE: PairRangeError,
        ErrorCause.PAIR_ORDER: PairOrderError,
    }
)
"""Exception for each cause in the ERROR register."""


class KernelRun(Run):
    """A run of an update kernel.

    Parameters
    ----------
    name : of the rule.
    buffers : by array; each has a window of the kernel.
    count : elements.
    beats : of its transfers, at most.
    channel, base : channel of the run, and the device address of the channel.
    reset : resets the kernel, after an abort that memory blocks.
    lock : of the channel, held from the end of the run until the outcome has been read from the
        registers, which the next run uses, too.

    Attributes
    ----------
    thread : that started it.
    is_over : the end has been noticed; a read of the attribute does not access the device.
    """

    backend: Backend

    def __init__(
        self,
        name: str,
        backend: Backend,
        kernel: BlockRegisters,
        buffers: Mapping[str, Buffer],
        *,
        count: int,
        beats: int,
        channel: int,
        base: int,
        reset: Callable[[], None],
        lock: CommandLock,
    ) -> None:
        self.name = name
        self.thread = threading.current_thread()
        self._lock = lock
        self.channel = channel
        self.count = count
        self._beats = beats
        self._base = base
        self._reset = reset
        self._buffers = dict(buffers)
        self.backend = backend
        self._kernel = kernel
        self.is_over = False
        self._error: DeviceError | None = None
        self._committed = 0
        self._counters: Mapping[str, int] = {}

    @property
    def what(self) -> str:
        """Description of the run, for messages."""
        return f"{self.name} of {self.count} elements"

    @property
    def ended(self) -> bool:
        """Whether the run has completed or failed. Reads the device, without a wait."""
        with self._lock:
            if not self.is_over:
                try:
                    if not self._kernel.status.busy:
                        self._finish()
                except (MemoryFaultError, ProtocolError) as error:
                    self._fail(error)
                    raise
            return self.is_over

    def sharing(self, buffer: Buffer) -> Sequence[str]:
        """Names of the run's arrays that share bytes with `buffer`."""
        return [
            name
            for name, used in self._buffers.items()
            if max(used.address, buffer.address)
            < min(used.address + used.nbytes, buffer.address + buffer.nbytes)
        ]

    @property
    def polls(self) -> Sequence[Poll]:
        return [self._kernel.status.poll(busy=0)]

    @property
    def bound(self) -> int:
        return IDLE_CYCLES + SLOWEST_CYCLES_PER_BEAT * self._beats

    @property
    def error(self) -> DeviceError | None:
        return self._error

    @property
    def committed(self) -> int:
        with self._lock:
            if not self.ended:
                self._kernel.control.latch = 1
                self._committed = self._kernel.committed.value
            return self._committed

    @property
    def cycles(self) -> int | None:
        return self._counters.get("cycles")

    @property
    def counters(self) -> Mapping[str, int]:
        return self._counters

    def wait(self, max_cycles: int | None = None) -> Self:
        check_bound(max_cycles)
        with self._lock:
            if not self.is_over:
                self._wait_idle(self.bound if max_cycles is None else max_cycles, self.what)
                self._finish()
        if self._error is not None:
            raise self._error
        return self

    def abort(self, max_cycles: int | None = None) -> None:
        check_bound(max_cycles)
        with self._lock:
            if self.is_over:
                return
            self._kernel.control.abort = 1
            bound = IDLE_CYCLES if max_cycles is None else max_cycles
            try:
                self._wait_idle(bound, f"{self.what} to drain after abort")
            except WaitTimeoutError:
                self.forget("aborted, and reset because memory did not answer")
                self._reset()
            else:
                self._finish()

    def forget(self, reason: str) -> None:
        """Mark the run as lost by the device."""
        with self._lock:
            if not self.is_over:
                self._fail(
                    AbortedError(
                        cause=reason,
                        stream="none",
                        address=0,
                        committed=self._committed,
                        count=self.count,
                    )
                )

    def check_done(self) -> None:
        """Check that the run has completed.

        Raises
        ------
        BusyError : the run has not ended.
        KernelError, MemoryFaultError, ProtocolError : the run failed.
        """
        if not self.ended:
            raise BusyError(f"{self.what} has not ended", registers=self._kernel.dump())
        if self._error is not None:
            raise self._error

    def _wait_idle(self, max_cycles: int, what: str) -> None:
        try:
            self.backend.wait([self._kernel.status.poll(busy=0)], max_cycles)
        except WaitTimeoutError as error:
            self._kernel.control.latch = 1
            self._committed = self._kernel.committed.value
            raise WaitTimeoutError(
                what,
                max_cycles,
                unit=error.unit,
                registers=self._kernel.dump(),
                transactions=self.backend.transactions(),
            ) from error
        except (MemoryFaultError, ProtocolError) as error:
            self._fail(error)
            raise

    def _fail(self, error: DeviceError) -> None:
        self._error = error
        self.is_over = True

    def _finish(self) -> None:
        """Read the outcome from the registers and close the windows."""
        self._collect()
        self.is_over = True  # last: other threads read it

    def _collect(self) -> None:
        kernel = self._kernel
        self._committed = kernel.committed.value
        clocked = self.backend.cycles is not None  # read once: the device may be remote
        names = [
            register.name
            for register, field in kernel.map.fields()
            if field.access is Access.COUNTER and (clocked or _exact(register.name))
        ]
        self._counters = {name: kernel[name].value for name in names}
        if kernel.status.error:
            cause = ErrorCause(kernel.error.cause)
            kind, address = ERRORS[cause], self._base + kernel.error_address.value
            pair: dict[str, Any] = {}
            if issubclass(kind, PairError):
                indices = self._buffers[INDEX]
                pair["position"] = (address - indices.address) // indices.dtype.itemsize
            self._error = kind(
                **pair,
                cause=cause.name,
                stream=_stream(kernel),
                address=address,
                committed=self._committed,
                count=self.count,
                registers=kernel.dump(),
                transactions=self.backend.transactions(),
            )
        elif not kernel.status.done:
            self._error = ModeError(
                f"run {self.name}: START of {self.what} was refused",
                self.channel,
                "acceleration",
                "another",
                registers=kernel.dump(),
            )
        for index in range(len(self._buffers)):
            kernel[f"window{index}_permissions"].set(read=0, write=0, valid=0)


def _stream(kernel: BlockRegisters) -> str:
    """Name of the stream in `error.stream`."""
    names = kernel.map["error"].field("stream").values
    assert names is not None
    return names(kernel.error.stream).name


class UpdateRun(KernelRun):
    """A step that was started by `nearstep.updater.device.KernelDevice.update`."""

    @property
    def rule(self) -> str:
        """The update rule."""
        return self.name

    @property
    def duplicates(self) -> int:
        """Number of pairs overridden by a later pair of the same index, after `check_done`."""
        self.check_done()
        return self._counters.get("duplicates", 0)


class ScanRun(KernelRun):
    """A scan that was started by `nearstep.updater.device.KernelDevice.scan`; it commits nothing.

    Attributes
    ----------
    found_inf : a gradient is infinite or NaN.
    sum_of_squares : of all gradients, binary64, added in the order of
        `nearstep_hw.updater.scan.GradientScan`, which also bounds the error.
    """

    _found_inf = False
    _sum_of_squares = 0.0

    @property
    def found_inf(self) -> bool:
        """Whether a gradient is infinite or NaN, after `check_done`."""
        self.check_done()
        return self._found_inf

    @property
    def sum_of_squares(self) -> float:
        """Sum of the squares of all gradients, after `check_done`."""
        self.check_done()
        return self._sum_of_squares

    def _collect(self) -> None:
        super()._collect()
        if self._error is None:
            bits = np.uint64(self._kernel.sum_of_squares.value)
            self._found_inf = bool(self._kernel.scan.found_inf)
            self._sum_of_squares = float(bits.view(np.float64))


def _exact(counter: str) -> bool:
    """Whether a counter is meaningful on a device without a clock."""
    return counter != "cycles" and not counter.startswith("stall_")
