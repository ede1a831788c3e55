"""Devices of update kernels without a clock: registers and results of the RTL."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Poll, TakeLargest
from nearstep.backends.emulated import EmulatedBackend, Injection
from nearstep.errors import (
    BusError,
    ClosedDeviceError,
    MemoryFaultError,
    OutOfBoundsError,
    WaitTimeoutError,
)
from nearstep_sim.golden import blockwise, blockwise_cpp, formats_cpp, fp, rounding_cpp
from nearstep_sim.golden.rounding import round_stochastically
from nearstep_sim.golden.rule import SparseGradient, evaluate
from nearstep_sim.golden.topk import decompress
from nearstep_sim.golden.topk_cpp import taker
from nearstep_sim.models.bulk import Bulk, native_bulk
from nearstep_sim.models.memory import GUARD, UNWRITTEN
from nearstep_sim.updater.golden_channel import GoldenChannel
from nearstep_sim.updater.golden_kernel import Engine, Floats
from nearstep_sim.updater.golden_port import ArmedInjection
from nearstep_spec.csr.block import Response
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.scale import GRADIENT
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.operands import operands

STEP_ELEMENTS = 1 << 24
"""Elements of one step during a wait: 64 MiB of each array. Steps are large because the arrays
evict the interpreter, which runs between two steps, from the caches."""

ACCESSES_PER_STEP = 32
"""Register accesses in the time of a block."""

KEPT_TRANSACTIONS = 32


def make_engines(config: UpdateKernelConfig, kind: str) -> Sequence[Engine]:
    """The arithmetic of each rule of a kernel, compiled if need be."""
    if kind == "cpp" and any(each.has_16_bits for each in operands(config).values()):
        formats_cpp.load()
    if kind == "cpp" and config.stochastic_rounding:
        rounding_cpp.load()
    if kind == "cpp" and config.blockwise:
        blockwise_cpp.load()
    return [_engine(rule, kind) for rule in config.rule_set.rules]


def make_bulk(kind: str) -> Bulk | None:
    """Return the copy functions for a kind of engine."""
    return native_bulk() if kind == "cpp" else None


def make_taker(kind: str) -> TakeLargest | None:
    """Return the function that selects largest elements of host arrays, for a kind of engine."""
    return taker() if kind == "cpp" else None


def _engine(rule: Rule, kind: str) -> Engine:
    if kind == "cpp":
        from nearstep_sim.golden.rule_cpp import kernel

        return kernel(rule)

    return NumpyEngine(rule)


class NumpyEngine:
    """A rule in numpy."""

    in_place = None
    widen = staticmethod(fp.widen32)
    narrow = staticmethod(fp.narrow32)
    round = staticmethod(round_stochastically)
    quantize = staticmethod(blockwise.quantize)
    dequantize = staticmethod(blockwise.dequantize)

    def __init__(self, rule: Rule) -> None:
        self._rule = rule

    def __call__(self, arrays: Mapping[str, Floats], scalars: Mapping[str, float]) -> None:
        for name, result in evaluate(self._rule, arrays, scalars).items():
            arrays[name][:] = result

    def of_pairs(
        self,
        arrays: Mapping[str, Floats],
        scalars: Mapping[str, float],
        gradient: SparseGradient,
    ) -> None:
        index, value = gradient
        count = next(iter(arrays.values())).size
        made = decompress(index, value, pairs=index.size, count=count, group=1, granule=1)
        self({**arrays, GRADIENT: made.dense.view(np.float32)}, scalars)


class GoldenBackend(EmulatedBackend):
    """A device of update kernels without a clock; subclasses make its channels.

    Its time is counted in steps: at every 32nd register access a busy kernel updates a block, and a
    wait runs larger steps. `cycles` is None.

    Parameters
    ----------
    memory_bytes : over all channels.

    Attributes
    ----------
    lends : kernels may access memory of the host (`lend_memory`).
    """

    compares_memory = True
    lends = True

    def __init__(self, memory_bytes: int, take_largest: TakeLargest | None = None) -> None:
        self._take_largest = take_largest
        self.capacity_bytes = memory_bytes
        self._log: deque[str] = deque(maxlen=KEPT_TRANSACTIONS)
        self._channels = self._make_channels()
        self._accesses = 0
        self._closed = False

    @abstractmethod
    def _make_channels(self) -> Sequence[GoldenChannel]:
        """Make the channels, in the order of their memory; bursts are logged in `_log`."""

    @property
    def take_largest(self) -> TakeLargest | None:
        return self._take_largest

    @property
    def regions(self) -> Sequence[tuple[int, int]]:
        return tuple((channel.base, channel.memory.data.size) for channel in self._channels)

    @property
    def cycles(self) -> int | None:
        return None

    def read_register(self, address: int) -> int:
        self._take_time()
        channel = self._channel_of_register(address)
        answer = channel.read_register(address)
        if answer.error and channel.answers:
            raise BusError(address, Response.SLVERR, write=False)
        return answer.value

    def write_register(self, address: int, value: int) -> None:
        self._take_time()
        channel = self._channel_of_register(address)
        answer = channel.write_register(address, value)
        if answer.error and channel.answers:
            raise BusError(address, Response.SLVERR, write=True)

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        self._check_open()
        self._channel(address, out.size).read(address, out)

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        self._check_open()
        self._channel(address, data.size).write(address, data)

    def fill_memory(self, address: int, nbytes: int, element: NDArray[np.uint8]) -> None:
        self._check_open()
        self._channel(address, nbytes).fill(address, nbytes, element)

    def memory_holds(self, address: int, data: NDArray[np.uint8]) -> bool | None:
        self._check_open()
        return self._channel(address, data.size).holds_bytes(address, data)

    def lend_memory(self, address: int, data: NDArray[np.uint8], *, writes: bool) -> bool:
        self._check_open()
        return self.lends and self._channel(address, data.size).lend(address, data, writes=writes)

    def end_loan(self, address: int) -> None:
        channel = self._channel(address, 0)
        channel.memory.give_back(address - channel.base)

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        self._check_open()
        left = max_cycles
        while True:
            self._check_memory_fault()
            if any(
                poll.holds(
                    self._channel_of_register(poll.address).read_register(poll.address).value
                )
                for poll in polls
            ):
                return
            moving = [channel.kernel.port for channel in self._channels if channel.can_advance]
            if left <= 0 or not moving:
                raise WaitTimeoutError(
                    " or ".join(map(str, polls)),
                    max_cycles,
                    unit="steps",
                    transactions=self.transactions(),
                )
            skipped = min(left - 1, *(max(0, port.late - 1) for port in moving))
            for port in moving:
                port.late -= min(skipped, max(0, port.late - 1))
            left -= skipped + 1
            self._advance(STEP_ELEMENTS)

    def reset(self) -> None:
        self._check_open()
        for channel in self._channels:
            channel.reset()

    def close(self) -> None:
        self._closed = True

    def transactions(self) -> Sequence[str]:
        return tuple(self._log)

    def protect(self, address: int, nbytes: int) -> None:
        channel = self._channel(address, nbytes)
        channel.memory.mark(address - channel.base, nbytes, GUARD)

    def claim(self, address: int, nbytes: int) -> None:
        channel = self._channel(address, nbytes)
        channel.memory.mark(address - channel.base, nbytes, UNWRITTEN)

    def inject(self, injection: Injection) -> None:
        injection.check_kernels()
        for channel in self._channels:
            shifted = replace(
                injection,
                base=max(0, injection.base - channel.base),
                limit=max(1, injection.limit - channel.base),
            )
            if injection.limit > channel.base:
                channel.kernel.port.injections.append(ArmedInjection(shifted))

    def heal(self) -> None:
        for channel in self._channels:
            channel.kernel.port.injections.clear()

    def _take_time(self) -> None:
        """A register access: a fraction of a step."""
        self._check_open()
        self._check_memory_fault()
        self._accesses += 1
        if self._accesses % ACCESSES_PER_STEP == 0:
            self._advance(1)

    def _check_memory_fault(self) -> None:
        """Raise a kernel's memory violation, until a reset."""
        for channel in self._channels:
            if channel.fault is not None:
                self._raise(channel.fault)

    def _advance(self, elements: int) -> None:
        """Advance the kernels by a step, and raise violations found by the memory."""
        for channel in self._channels:
            try:
                channel.advance(elements)
            except MemoryFaultError as fault:
                self._raise(fault)

    def _raise(self, fault: MemoryFaultError) -> NoReturn:
        raise type(fault)(
            fault.reason, fault.address, write=fault.write, transactions=self.transactions()
        ) from None

    def _channel(self, address: int, nbytes: int) -> GoldenChannel:
        """The channel of a range of memory."""
        for channel in self._channels:
            if (
                channel.base <= address
                and address + nbytes <= channel.base + channel.memory.data.size
            ):
                return channel
        regions = ", ".join(f"[{base:#x}, {base + size:#x})" for base, size in self.regions)
        last = self._channels[-1]
        raise OutOfBoundsError(
            f"memory access (channels: {regions})",
            address,
            address + nbytes,
            last.base + last.memory.data.size,
        )

    def _channel_of_register(self, address: int) -> GoldenChannel:
        for channel in self._channels:
            if channel.holds(address):
                return channel
        return self._channels[0]

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedDeviceError(f"golden:{self.family}", "use the model")
