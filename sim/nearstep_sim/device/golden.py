"""``golden:axdimm``: registers and results of the RTL, without its cycles."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep.backends.base import Poll
from nearstep.backends.emulated import EmulatedBackend, Injection
from nearstep.backends.options import parse_options
from nearstep.errors import (
    BusError,
    ClosedDeviceError,
    MemoryFaultError,
    UrlError,
    WaitTimeoutError,
)
from nearstep_hw.axdimm.config import AdamKernelConfig
from nearstep_hw.axdimm.registers import COUNTERS, device_maps, update_rule
from nearstep_hw.csr.block import Response
from nearstep_sim.device.golden_adam import ArmedInjection, Engine, GoldenAdamKernel
from nearstep_sim.device.memory import GUARD, UNWRITTEN, EmulatedMemory
from nearstep_sim.device.options import GoldenOptions
from nearstep_sim.golden.registers import RegisterFile
from nearstep_sim.golden.rule import evaluate

STEP_ELEMENTS = 1 << 20
"""Elements of one step while the device is waited for: 4 MiB of each array."""

ACCESSES_PER_STEP = 32
"""Register accesses in the time of a block."""

KEPT_TRANSACTIONS = 32


def open_device(family: str, options: dict[str, str]) -> GoldenBackend:
    """Open ``golden:<family>``.

    Raises
    ------
    UrlError
        There is no golden model of the family.
    OptionError
    """
    if family != "axdimm":
        raise UrlError(f"golden:{family}", f"there is no family {family!r}", ("axdimm",))
    parsed = parse_options(GoldenOptions, "golden:axdimm", options)
    return GoldenBackend(parsed.config(), parsed.memory_bytes, make_engine(parsed))


def make_engine(options: GoldenOptions) -> Engine:
    """The kernel of ``options``, compiled if need be."""
    rule = update_rule(options.config())
    if options.engine == "cpp":
        from nearstep_sim.golden.rule_cpp import kernel

        return kernel(rule)

    def run(arrays: dict[str, NDArray[np.float32]], scalars: dict[str, float]) -> None:
        for name, result in evaluate(rule, arrays, scalars).items():
            arrays[name][:] = result

    return run


class GoldenBackend(EmulatedBackend):
    """An AXDIMM without a clock.

    Its time is counted in steps: every 32 register accesses let a busy kernel work through a block,
    and a wait goes on in larger steps. ``cycles`` is None.

    Parameters
    ----------
    config: AdamKernelConfig
    memory_bytes: int
    engine: Engine
    """

    def __init__(self, config: AdamKernelConfig, memory_bytes: int, engine: Engine) -> None:
        self.family = "axdimm"
        self.config = config
        self.capacity_bytes = memory_bytes
        self._memory = EmulatedMemory(memory_bytes)
        self._log: deque[str] = deque(maxlen=KEPT_TRANSACTIONS)
        ((self._base, self._map),) = device_maps(config).values()
        self._registers = RegisterFile(self._map)
        self._kernel = GoldenAdamKernel(
            config, self._memory, engine, lambda path: self._registers[path], self._log.append
        )
        self._fault: MemoryFaultError | None = None
        self._accesses = 0
        self._closed = False

    @property
    def cycles(self) -> int | None:
        return None

    def read_register(self, address: int) -> int:
        self._take_time()
        answer = self._registers.read(address - self._base)
        if answer.error:
            raise BusError(address, Response.SLVERR, write=False)
        return answer.value

    def write_register(self, address: int, value: int) -> None:
        self._take_time()
        answer = self._registers.write(address - self._base, value)
        if answer.error:
            raise BusError(address, Response.SLVERR, write=True)
        if "start.go" in answer.pulses:
            self._kernel.start()
            self._show()
            if not self._kernel.busy:  # it was, between one access and the next
                self._registers.capture()
        if "control.abort" in answer.pulses:
            self._kernel.abort()

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        self._check_open()
        self._memory.read(address, out)

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        self._check_open()
        self._memory.write(address, data)

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        self._check_open()
        left = max_cycles
        while True:
            self._raise_fault()
            if any(
                poll.holds(self._registers.read(poll.address - self._base).value) for poll in polls
            ):
                return
            if left <= 0 or not self._kernel.can_advance:
                raise WaitTimeoutError(
                    " or ".join(map(str, polls)),
                    max_cycles,
                    unit="steps",
                    transactions=self.transactions(),
                )
            skipped = min(left - 1, max(0, self._kernel.late - 1))
            self._kernel.late -= skipped
            left -= skipped + 1
            self._advance(STEP_ELEMENTS)

    def reset(self) -> None:
        self._check_open()
        self._fault = None
        self._kernel.reset()
        self._registers = RegisterFile(self._map)

    def close(self) -> None:
        self._closed = True

    def transactions(self) -> Sequence[str]:
        return tuple(self._log)

    def protect(self, address: int, nbytes: int) -> None:
        self._memory.mark(address, nbytes, GUARD)

    def claim(self, address: int, nbytes: int) -> None:
        self._memory.mark(address, nbytes, UNWRITTEN)

    def inject(self, injection: Injection) -> None:
        self._kernel.injections.append(ArmedInjection(injection))

    def heal(self) -> None:
        self._kernel.injections.clear()

    def _take_time(self) -> None:
        """A register access: a fraction of a step."""
        self._check_open()
        self._raise_fault()
        self._accesses += 1
        if self._accesses % ACCESSES_PER_STEP == 0:
            self._advance(1)

    def _advance(self, elements: int) -> None:
        """Let the kernel take a step, and raise what the memory has to say about it."""
        self._raise_fault()
        try:
            self._kernel.advance(elements)
        except MemoryFaultError as fault:
            self._fault = type(fault)(
                fault.reason, fault.address, write=fault.write, transactions=self.transactions()
            )
            raise self._fault from None
        self._show()

    def _show(self) -> None:
        """Put what has changed into the registers; ``busy`` last: its fall captures counters."""
        kernel = self._kernel
        state = {
            **{f"{name}.value": kernel.counters[name] for name in COUNTERS},
            "error.cause": int(kernel.cause),
            "error.stream": int(kernel.stream),
            "error.response": kernel.response,
            "error_address.value": kernel.address,
            "status.done": int(kernel.done),
            "status.error": int(kernel.cause != 0),
            "status.busy": int(kernel.busy),
        }
        for path, value in state.items():
            if value != self._registers[path]:
                self._registers[path] = value

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedDeviceError("golden:axdimm", "use the model")

    def _raise_fault(self) -> None:
        if self._fault is not None:
            raise self._fault
