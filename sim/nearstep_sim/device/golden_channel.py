"""One channel of ``golden:axdimm``: memory, kernel, and the arbiter where there is one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep.errors import MemoryFaultError
from nearstep_sim.device.golden_adam import Engine, GoldenAdamKernel
from nearstep_sim.device.memory import EmulatedMemory
from nearstep_sim.golden.registers import Answer, RegisterFile
from nearstep_spec.csr.model import BLOCK_BYTES, LINE_BYTES, RegisterMap
from nearstep_spec.updater.config import AdamKernelConfig


class GoldenChannel:
    """Registers, memory and time of one kernel; addresses are those of the device.

    With an arbiter the kernel works in acceleration mode only, START in normal mode is refused and
    flagged, and the host's accesses of memory count in normal mode only: otherwise a read gives
    zeros and a write does nothing, and both are flagged. A mode that is requested is reached at
    once.

    Parameters
    ----------
    config: AdamKernelConfig
    base, memory_bytes: int
        Where its memory begins, and how much there is.
    kernel: tuple[int, RegisterMap]
        Address and registers of the kernel.
    arbiter: tuple[int, RegisterMap] | None
    engines: Sequence[Engine]
    log: Callable[[str], None]
        Takes a line for each burst.
    end: int | None
        Where the kernel's arrays must end at the latest; None is the address space.
    """

    def __init__(
        self,
        config: AdamKernelConfig,
        base: int,
        memory_bytes: int,
        kernel: tuple[int, RegisterMap],
        arbiter: tuple[int, RegisterMap] | None,
        engines: Sequence[Engine],
        log: Callable[[str], None],
        end: int | None = None,
    ) -> None:
        self.base = base
        self.memory = EmulatedMemory(memory_bytes)
        self._kernel_base, self._kernel_map = kernel
        self._registers = RegisterFile(self._kernel_map)
        self.kernel = GoldenAdamKernel(
            config, self.memory, engines, lambda path: self._registers[path], log, end
        )
        self._arbiter_base, self._arbiter = -1, None
        if arbiter is not None:
            self._arbiter_base, arbiter_map = arbiter
            self._arbiter = RegisterFile(arbiter_map)
            self._arbiter["status.normal"] = 1
        self.fault: MemoryFaultError | None = None

    @property
    def can_advance(self) -> bool:
        """Whether more steps can change anything."""
        return self.kernel.can_advance and self.kernel_runs

    @property
    def kernel_runs(self) -> bool:
        """Whether the kernel has the memory."""
        return self._arbiter is None or bool(self._arbiter["status.acceleration"])

    @property
    def host_reaches(self) -> bool:
        """Whether the host has the memory."""
        return self._arbiter is None or bool(self._arbiter["status.normal"])

    @property
    def answers(self) -> bool:
        """Whether the host's bus has error responses; a DIMM's has none."""
        return self._arbiter is None

    def holds(self, address: int) -> bool:
        """Whether a register may be at ``address``."""
        bases = (self._kernel_base, *([] if self._arbiter is None else [self._arbiter_base]))
        return any(base <= address < base + BLOCK_BYTES for base in bases)

    def read_register(self, address: int) -> Answer:
        file, offset = self._file(address)
        return file.read(offset)

    def write_register(self, address: int, value: int) -> Answer:
        file, offset = self._file(address)
        if file is self._arbiter:
            return self._command(file, offset, value)
        if offset == self._kernel_map["start"].offset and not self.kernel_runs:
            if value & 1 and self._arbiter is not None:
                self._arbiter["status.refused_start"] = 1
            return Answer()
        answer = file.write(offset, value)
        if "start.go" in answer.pulses:
            self.kernel.start()
            self._show()
            if not self.kernel.busy:  # it was, between one access and the next
                self._registers.capture()
        if "control.abort" in answer.pulses:
            self.kernel.abort()
        return answer

    def read(self, address: int, out: NDArray[np.uint8]) -> None:
        """Copy memory to ``out``."""
        if not self.host_reaches:
            self._refuse(address, out.size, write=False)
            out[:] = 0
            return
        self.memory.read(address - self.base, out)

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        """Copy ``data`` to memory."""
        if not self.host_reaches:
            self._refuse(address, data.size, write=True)
            return
        self.memory.write(address - self.base, data)

    def advance(self, elements: int) -> None:
        """Let the kernel take a step.

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
        self._show()

    def reset(self) -> None:
        """Hard reset of the kernel, and normal mode."""
        self.fault = None
        self._reset_kernel()
        if self._arbiter is not None:
            self._arbiter["mode.acceleration"] = 0
            self._change_mode()

    def _reset_kernel(self) -> None:
        self.kernel.reset()
        self._registers = RegisterFile(self._kernel_map)

    def _file(self, address: int) -> tuple[RegisterFile, int]:
        if self._arbiter is not None and 0 <= address - self._arbiter_base < BLOCK_BYTES:
            return self._arbiter, address - self._arbiter_base
        return self._registers, address - self._kernel_base

    def _command(self, arbiter: RegisterFile, offset: int, value: int) -> Answer:
        answer = arbiter.write(offset, value)
        if "control.clear" in answer.pulses:
            for path in (
                "status.refused_access",
                "status.refused_start",
                "refused_count.value",
                "refused_access.write",
                "refused_address.value",
                "status.missing_data",
                "status.lost_command",
                "lost_count.value",
                "lost_command.pins",
                "lost_command.bank",
            ):
                arbiter[path] = 0
        if "control.kernel_reset" in answer.pulses:
            self._reset_kernel()
        self._change_mode()
        return answer

    def _change_mode(self) -> None:
        if self._arbiter is not None:
            accelerated = self._arbiter["mode.acceleration"]
            self._arbiter["status.acceleration"] = accelerated
            self._arbiter["status.normal"] = 1 - accelerated

    def _refuse(self, address: int, nbytes: int, *, write: bool) -> None:
        arbiter = self._arbiter
        if arbiter is None or not nbytes:
            return
        inside = address - self.base
        if not arbiter["status.refused_access"]:
            arbiter["refused_access.write"] = int(write)
            arbiter["refused_address.value"] = inside // LINE_BYTES * LINE_BYTES
        arbiter["status.refused_access"] = 1
        lines = (inside + nbytes - 1) // LINE_BYTES - inside // LINE_BYTES + 1
        arbiter["refused_count.value"] = (arbiter["refused_count.value"] + lines) & 0xFFFF_FFFF

    def _show(self) -> None:
        """Put what has changed into the registers; ``busy`` last: its fall captures counters."""
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
