"""One channel of a device without a clock: memory and kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import MemoryFaultError
from nearstep_sim.golden.registers import Answer, RegisterFile
from nearstep_sim.models.bulk import Bulk
from nearstep_sim.models.memory import EmulatedMemory
from nearstep_sim.updater.golden_kernel import Engine, GoldenKernel
from nearstep_spec.csr.model import BLOCK_BYTES, RegisterMap
from nearstep_spec.updater.config import UpdateKernelConfig


class GoldenChannel:
    """Registers, memory and time of one kernel; addresses are those of the device.

    Parameters
    ----------
    base, memory_bytes : address and size of the channel's memory.
    kernel : address and registers of the kernel.
    log : takes a line for each burst.
    end : largest end address of the kernel's arrays; None: that of the address space.
    bulk : copy functions; None: numpy.
    memory : existing memory of the channel, if any.
    before_write : called with bytes that the kernel is about to write: address in the memory, size.
    """

    def __init__(
        self,
        config: UpdateKernelConfig,
        base: int,
        memory_bytes: int,
        kernel: tuple[int, RegisterMap],
        engines: Sequence[Engine],
        log: Callable[[str], None],
        end: int | None = None,
        bulk: Bulk | None = None,
        *,
        memory: EmulatedMemory | None = None,
        before_write: Callable[[int, int], None] | None = None,
    ) -> None:
        self.base = base
        self.memory = EmulatedMemory(memory_bytes, bulk) if memory is None else memory
        self._kernel_base, self._kernel_map = kernel
        self._registers = RegisterFile(self._kernel_map)
        self.kernel = GoldenKernel(
            config, self.memory, engines, lambda path: self._registers[path], log, end, before_write
        )
        self.fault: MemoryFaultError | None = None

    @property
    def can_advance(self) -> bool:
        """Whether further steps can change state."""
        is_shown = self._registers["status.busy"] == self.kernel.busy  # unless interrupted
        return (self.kernel.can_advance or not is_shown) and self.kernel_runs

    @property
    def kernel_runs(self) -> bool:
        """Whether the kernel has the memory."""
        return True

    @property
    def answers(self) -> bool:
        """Whether the host's bus has error responses."""
        return True

    def holds(self, address: int) -> bool:
        """Whether a register may be at `address`."""
        return self._kernel_base <= address < self._kernel_base + BLOCK_BYTES

    def read_register(self, address: int) -> Answer:
        return self._registers.read(address - self._kernel_base)

    def write_register(self, address: int, value: int) -> Answer:
        answer = self._registers.write(address - self._kernel_base, value)
        if "start.go" in answer.pulses:
            try:
                self.kernel.start()
                self._show()
            except BaseException:  # Ctrl-C: no run has started unless the registers show it
                self.kernel.busy = False
                self._show()
                raise
            if not self.kernel.busy:  # it was busy between two accesses
                self._registers.capture()
        if "control.abort" in answer.pulses:
            self.kernel.abort()
        return answer

    def read(self, address: int, out: NDArray[np.uint8]) -> None:
        """Copy memory to `out`."""
        self.memory.read(address - self.base, out)

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy `data` to memory."""
        self.memory.write(address - self.base, data)

    def fill(self, address: int, nbytes: int, element: NDArray[np.uint8]) -> None:
        """Fill a range of memory with repeated `element`."""
        self.memory.fill(address - self.base, nbytes, element)

    def holds_bytes(self, address: int, data: NDArray[np.uint8]) -> bool | None:
        """Whether memory is equal to `data`; None if the host has no access."""
        return self.memory.holds(address - self.base, data)

    def lend(self, address: int, data: NDArray[np.uint8], *, writes: bool) -> bool:
        """Map `data` into memory, if the host may write the range.

        Refused while faults are injected: the effects of a failed run on the data would not be
        visible.
        """
        if self.kernel.port.injections:
            return False
        return self.memory.lend(address - self.base, data, writes=writes)

    def advance(self, elements: int) -> None:
        """Advance the kernel by a step.

        Raises
        ------
        MemoryFaultError
        """
        if self.fault is not None:
            raise self.fault
        if not self.kernel_runs:
            return
        try:
            self.kernel.advance(elements)
        except MemoryFaultError as fault:
            self.fault = type(fault)(fault.reason, self.base + fault.address, write=fault.write)
            raise self.fault from None
        except BaseException:  # Ctrl-C: elements that are not committed may have been written
            self.kernel.abort_now()
            raise
        finally:
            self._show()

    def reset(self) -> None:
        """Hard reset of the kernel."""
        self.fault = None
        self.reset_kernel()

    def reset_kernel(self) -> None:
        self.kernel.reset()
        self._registers = RegisterFile(self._kernel_map)

    def _show(self) -> None:
        """Update the registers; `busy` last, since its fall captures counters."""
        kernel = self.kernel
        outcome = {}
        if kernel.config.scan:
            outcome["scan.found_inf"] = kernel.found_inf
            outcome["sum_of_squares.value"] = kernel.sum_of_squares
        state = {
            **{f"{name}.value": value for name, value in kernel.counters.items()},
            "error.cause": int(kernel.fault.cause),
            "error.stream": int(kernel.fault.stream),
            "error.response": kernel.fault.response,
            "error_address.value": kernel.fault.address,
            **outcome,
            "status.done": int(kernel.done),
            "status.error": int(kernel.fault.cause != 0),
            "status.busy": int(kernel.busy),
        }
        for path, value in state.items():
            if value != self._registers[path]:
                self._registers[path] = value
