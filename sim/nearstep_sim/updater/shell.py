"""Base of the devices of one Verilated shell: library, registers and waits."""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

from nearstep.backends.base import Poll
from nearstep.backends.emulated import EmulatedBackend, Injection
from nearstep.backends.peer import PeerBackend
from nearstep.errors import BusError, DeviceError, WaitTimeoutError
from nearstep_sim.coverage.observed import saw_register
from nearstep_sim.models.memory import GUARD, UNWRITTEN, EmulatedMemory
from nearstep_sim.verilate.abi import load, structure
from nearstep_sim.verilate.harness import (
    FAULTED,
    HISTORY_BYTES,
    HUNG,
    TIMEOUT,
    CInjection,
    CPoll,
    FaultRecord,
    Simulation,
    writable,
)
from nearstep_sim.verilate.options import SimulationOptions

MEMORY_LATENCY = {"ideal": 1, "halfduplex": 40}
"""Cycles of latency of each memory."""


class ShellOptions(structure("updater/shell_device.hpp", "Options")):
    """Options of the harness."""


_Counters = structure("models/memory.hpp", "MemoryCounters")


class ShellBackend(EmulatedBackend):
    """A device whose every cycle is simulated.

    Register accesses and waits take device cycles.

    Parameters
    ----------
    library : builds the library of the configuration; called after all checks of options.
    host_ids : IDs at the memory below this are the host's.

    Attributes
    ----------
    source : the C++ that declares the library's functions.
    """

    source: str

    def __init__(
        self,
        library: Callable[[], Path],
        options: SimulationOptions,
        memory_bytes: int,
        *,
        host_ids: int = 0,
    ) -> None:
        self.options = options
        self._host_ids = host_ids
        self.capacity_bytes = memory_bytes
        self._memory = EmulatedMemory(memory_bytes)
        if options.trace is not None:
            writable(self._name, "trace", options.trace)
        self._lib = load(library(), self.source)
        latency = options.latency
        handle = self._open(
            ShellOptions(
                data=self._memory.data.ctypes.data,
                state=self._memory.state.ctypes.data,
                capacity=memory_bytes,
                latency=MEMORY_LATENCY[options.memory] if latency is None else latency,
                seed=options.seed,
                half_duplex=int(options.memory == "halfduplex"),
                native=int(options.fu == "native"),
                stall=round(options.stall * 65536),
                host_ids=host_ids,
                trace=None if options.trace is None else options.trace.encode(),
            )
        )
        self._simulation = Simulation(
            self,
            self._name,
            handle,
            self._lib.device_close,
            self._lib.device_abandon,
            keep=self._memory,
            at_exit=options.trace is not None,
        )

    @abstractmethod
    def _open(self, options: ShellOptions) -> int:
        """Open a device, and return its handle."""

    @property
    def cycles(self) -> int | None:
        return int(self._lib.device_cycle(self._device))

    @property
    def memory_counters(self) -> dict[str, int]:
        """Beats and turnarounds that the memory counted since it was opened."""
        counters = _Counters()
        self._lib.device_counters(self._device, ctypes.byref(counters))
        return {name: getattr(counters, name) for name, *_ in _Counters._fields_}

    def read_register(self, address: int) -> int:
        word = ctypes.c_uint32()
        status = self._carry_out(self._lib.device_read_register, address, ctypes.byref(word))
        self._check(status, f"register read at {address:#x}")
        if status:
            raise BusError(address, status, write=False)
        self._saw(address, word.value)
        return word.value

    def write_register(self, address: int, value: int) -> None:
        status = self._carry_out(self._lib.device_write_register, address, value)
        self._check(status, f"register write at {address:#x}")
        if status:
            raise BusError(address, status, write=True)
        self._saw(address, value)

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        array = (CPoll * len(polls))(*((p.address, p.mask, p.value) for p in polls))
        end = self._lib.device_cycle(self._device) + max_cycles

        def look(device: int) -> int:
            left = max(0, end - self._lib.device_cycle(device))
            return int(self._lib.device_wait(device, array, len(polls), left))

        status = self._carry_out(look)
        self._check(status, "wait")
        if status == TIMEOUT:
            raise WaitTimeoutError(
                " or ".join(map(str, polls)), max_cycles, transactions=self.transactions()
            )

    def reset(self) -> None:
        self._lib.device_reset(self._device)

    def close(self) -> None:
        self._simulation.close()

    def transactions(self) -> Sequence[str]:
        text = ctypes.create_string_buffer(HISTORY_BYTES)
        self._lib.device_history(self._device, text, HISTORY_BYTES)
        return tuple(text.value.decode().splitlines())

    def protect(self, address: int, nbytes: int) -> None:
        self._memory.mark(address, nbytes, GUARD)

    def claim(self, address: int, nbytes: int) -> None:
        self._memory.mark(address, nbytes, UNWRITTEN)

    def inject(self, injection: Injection) -> None:
        if not self._host_ids:
            injection.check_kernels()
        if not isinstance(self, PeerBackend):
            injection.check_no_peer()
        self._lib.device_inject(self._device, ctypes.byref(CInjection.of(injection)))

    def heal(self) -> None:
        self._lib.device_heal(self._device)

    def _saw(self, address: int, word: int) -> None:
        in_rtl = self.options.fu != "native"
        saw_register(self, self.family, self.config, address, word, units=in_rtl)

    @property
    def _name(self) -> str:
        return f"sim:{self.family}"

    @property
    def _device(self) -> int:
        return self._simulation.handle

    def _carry_out(self, call: Callable[..., int], *arguments: object) -> int:
        """As `nearstep_sim.verilate.harness.Simulation.carry_out`."""
        return self._simulation.carry_out(call, *arguments)

    def _check(self, status: int, action: str) -> None:
        """Raise the error for which the simulation stopped, if any."""
        if status == HUNG:
            raise DeviceError(
                f"{action}: the register port does not answer", transactions=self.transactions()
            )
        if status == FAULTED:
            fault = FaultRecord()
            self._lib.device_fault(self._device, ctypes.byref(fault))
            raise fault.error(self.transactions())
