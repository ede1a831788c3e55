"""The host's driver on a kernel in cocotb: a backend whose calls wait for the simulator.

The driver is synchronous; run it in a thread that cocotb bridges::

    backend = CocotbBackend(dut, config)
    await backend.begin()
    await cocotb.task.bridge(job)(drive(backend, "cocotb:axdimm"))
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.handle import HierarchyObject
from cocotb.task import resume
from cocotb.triggers import ClockCycles
from cocotbext.axi import AxiBus, AxiLiteBus, AxiLiteMaster, AxiRam
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Poll
from nearstep.errors import BusError, WaitTimeoutError
from nearstep_sim.bench.axi_checker import AxiChecker
from nearstep_sim.bench.cocotb_axi import AxiPort
from nearstep_spec.csr.model import WORD_BYTES
from nearstep_spec.updater.config import UpdateKernelConfig

POLL_CYCLES = 16
RESET_CYCLES = 3


class CocotbBackend(Backend):
    """An `UpdateKernel` with the register and memory models of cocotbext-axi, and a checker.

    All methods but `begin` are called from a bridged thread.

    Parameters
    ----------
    dut : the kernel.
    config : its configuration.
    memory_bytes : size of the memory.
    """

    def __init__(
        self, dut: HierarchyObject, config: UpdateKernelConfig, memory_bytes: int = 1 << 18
    ) -> None:
        self.family = "axdimm"
        self.config = config
        self.capacity_bytes = memory_bytes
        self.checker = AxiChecker(beat_bytes=config.beat_bytes, read_ids=4, write_ids=3)
        self._dut = dut
        self._content = bytearray(memory_bytes)
        self._memory = np.frombuffer(self._content, np.uint8)
        self._port = AxiPort(dut, "m_axi", checker=self.checker)
        logging.getLogger(f"cocotb.{dut._name}").setLevel(logging.WARNING)  # every access

    async def begin(self) -> None:
        """Start the clock and the models, and reset the kernel."""
        dut = self._dut
        dut.rst.value = 1
        cocotb.start_soon(Clock(dut.clk, 5, unit="ns").start())
        names = {"bus_separator": "__", "case_insensitive": False}
        self._host = AxiLiteMaster(AxiLiteBus.from_prefix(dut, "s_axil", **names), dut.clk, dut.rst)
        self._ram = AxiRam(
            AxiBus.from_prefix(dut, "m_axi", **names), dut.clk, dut.rst, mem=self._content
        )
        cocotb.start_soon(self._port.run())
        await self._reset()

    @property
    def cycles(self) -> int | None:
        return int(self.checker.cycles)

    def read_register(self, address: int) -> int:
        return int(resume(self._read)(address))

    def write_register(self, address: int, value: int) -> None:
        resume(self._write)(address, value)

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        out[:] = self._memory[address : address + out.size]

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        self._memory[address : address + data.size] = data

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        resume(self._wait)(polls, max_cycles)

    def reset(self) -> None:
        resume(self._reset)()

    def close(self) -> None:
        """The simulator outlives the device: nothing to do."""

    async def _reset(self) -> None:
        self._dut.rst.value = 1
        await ClockCycles(self._dut.clk, RESET_CYCLES)
        self._dut.rst.value = 0
        await ClockCycles(self._dut.clk, 2)

    async def _read(self, address: int) -> int:
        answer = await self._host.read(address, WORD_BYTES)
        if answer.resp:
            raise BusError(address, int(answer.resp), write=False)
        return int.from_bytes(answer.data, "little")

    async def _write(self, address: int, value: int) -> None:
        answer = await self._host.write(address, value.to_bytes(WORD_BYTES, "little"))
        if answer.resp:
            raise BusError(address, int(answer.resp), write=True)

    async def _wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        limit = self.checker.cycles + max_cycles
        while True:
            for poll in polls:
                if poll.holds(await self._read(poll.address)):
                    return
            if self.checker.cycles >= limit:
                raise WaitTimeoutError(" or ".join(map(str, polls)), max_cycles)
            await ClockCycles(self._dut.clk, POLL_CYCLES)
