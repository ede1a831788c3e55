"""One channel of a DIMM without a clock: memory, kernel and arbiter."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from nearstep_sim.golden.registers import Answer, RegisterFile
from nearstep_sim.models.bulk import Bulk
from nearstep_sim.updater.golden_channel import GoldenChannel
from nearstep_sim.updater.golden_kernel import Engine
from nearstep_spec.csr.model import BLOCK_BYTES, LINE_BYTES, RegisterMap
from nearstep_spec.updater.config import UpdateKernelConfig

CLEARED = (
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
)
"""Registers of the arbiter that `control.clear` clears."""


class ArbitratedChannel(GoldenChannel):
    """A channel that host and kernel take turns with.

    The kernel runs only in acceleration mode; START in normal mode is refused and flagged. The host
    accesses memory only in normal mode: otherwise a read returns zeros, a write is dropped, and
    both are flagged. A requested mode is reached at once.

    Parameters
    ----------
    arbiter : address and registers; other parameters as of `GoldenChannel`.
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
        arbiter: tuple[int, RegisterMap],
    ) -> None:
        super().__init__(config, base, memory_bytes, kernel, engines, log, end, bulk)
        self._arbiter_base, arbiter_map = arbiter
        self._arbiter = RegisterFile(arbiter_map)
        self._arbiter["status.normal"] = 1

    @property
    def kernel_runs(self) -> bool:
        return bool(self._arbiter["status.acceleration"])

    @property
    def answers(self) -> bool:
        return False  # the bus of a DIMM has no error responses

    def holds(self, address: int) -> bool:
        return super().holds(address) or self._is_arbiter(address)

    def read_register(self, address: int) -> Answer:
        if self._is_arbiter(address):
            return self._arbiter.read(address - self._arbiter_base)
        return super().read_register(address)

    def write_register(self, address: int, value: int) -> Answer:
        if self._is_arbiter(address):
            return self._command(address - self._arbiter_base, value)
        start = self._kernel_base + self._kernel_map["start"].offset
        if address == start and not self.kernel_runs:
            if value & 1:
                self._arbiter["status.refused_start"] = 1
            return Answer()
        return super().write_register(address, value)

    def read(self, address: int, out: NDArray[np.uint8]) -> None:
        if self._arbiter["status.normal"]:
            super().read(address, out)
            return
        self._refuse(address, out.size, write=False)
        out[:] = 0

    def write(self, address: int, data: NDArray[np.uint8]) -> None:
        if self._arbiter["status.normal"]:
            super().write(address, data)
            return
        self._refuse(address, data.size, write=True)

    def fill(self, address: int, nbytes: int, element: NDArray[np.uint8]) -> None:
        if self._arbiter["status.normal"]:
            super().fill(address, nbytes, element)
            return
        self._refuse(address, nbytes, write=True)

    def holds_bytes(self, address: int, data: NDArray[np.uint8]) -> bool | None:
        return super().holds_bytes(address, data) if self._arbiter["status.normal"] else None

    def lend(self, address: int, data: NDArray[np.uint8], *, writes: bool) -> bool:
        normal = bool(self._arbiter["status.normal"])
        return normal and super().lend(address, data, writes=writes)

    def reset(self) -> None:
        """Hard reset of the kernel, and normal mode."""
        super().reset()
        self._arbiter["mode.acceleration"] = 0
        self._change_mode()

    def _is_arbiter(self, address: int) -> bool:
        return self._arbiter_base <= address < self._arbiter_base + BLOCK_BYTES

    def _command(self, offset: int, value: int) -> Answer:
        answer = self._arbiter.write(offset, value)
        if "control.clear" in answer.pulses:
            for path in CLEARED:
                self._arbiter[path] = 0
        if "control.kernel_reset" in answer.pulses:
            self.reset_kernel()
        self._change_mode()
        return answer

    def _change_mode(self) -> None:
        accelerated = self._arbiter["mode.acceleration"]
        self._arbiter["status.acceleration"] = accelerated
        self._arbiter["status.normal"] = 1 - accelerated

    def _refuse(self, address: int, nbytes: int, *, write: bool) -> None:
        if not nbytes:
            return
        arbiter, inside = self._arbiter, address - self.base
        if not arbiter["status.refused_access"]:
            arbiter["refused_access.write"] = int(write)
            arbiter["refused_address.value"] = inside // LINE_BYTES * LINE_BYTES
        arbiter["status.refused_access"] = 1
        lines = (inside + nbytes - 1) // LINE_BYTES - inside // LINE_BYTES + 1
        arbiter["refused_count.value"] = (arbiter["refused_count.value"] + lines) & 0xFFFF_FFFF
