"""The host's driver on a ring of devices in cocotb.

The driver is synchronous; run it in a thread that cocotb bridges::

    backend = CocotbPoolBackend(dut, config, devices=4, mode="both", seed=1)
    await backend.begin()
    await cocotb.task.bridge(job)(drive(backend, "cocotb:coarse"))
"""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Iterator, Sequence

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.handle import HierarchyObject
from cocotb.task import resume
from cocotb.triggers import ClockCycles, RisingEdge
from cocotbext.axi import AxiBus, AxiMaster, AxiRam
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Poll
from nearstep.errors import RESPONSES, BusError, CompletionError, PostedWriteError, WaitTimeoutError
from nearstep_hw.axi.signature import Response
from nearstep_sim.bench.axi_checker import AxiChecker
from nearstep_sim.bench.cocotb_axi import AxiPort
from nearstep_spec.coarse.config import BEAT_BYTES, CoarseConfig
from nearstep_spec.coarse.registers import register_bytes

STALLS = ("free", "source", "sink", "both")
"""Stalls: none, responses of memory, requests to memory, or both."""

GUARD = 0xA5
"""Every byte of memory before a test."""

POLL_CYCLES = 16
RESET_CYCLES = 4


class CocotbPoolBackend(Backend):
    """A ring of `ring_top` with the memories and masters of cocotbext-axi, and checkers.

    The links inside the ring are used.

    All methods but `begin` are called from a bridged thread.

    Parameters
    ----------
    dut : the ring.
    config : of the devices.
    devices : number of devices.
    mode : one of `STALLS`.
    seed : of the stalls.

    Attributes
    ----------
    memory : direct access to the memory of each device: a list of uint8 of shape (bytes,).
    checkers : of the memory ports.
    """

    def __init__(
        self,
        dut: HierarchyObject,
        config: CoarseConfig,
        *,
        devices: int,
        mode: str = "free",
        seed: int = 1,
    ) -> None:
        self.family = "coarse"
        self.config = config
        self.devices = devices
        self._register_bytes = register_bytes(config)
        self.capacity_bytes = devices * config.memory_bytes
        self.checkers: list[AxiChecker] = []
        self._dut = dut
        self._mode = mode
        self._random = random.Random(f"{seed} {mode}")
        self._content = [bytearray([GUARD]) * config.memory_bytes for _ in range(devices)]
        self.memory = [np.frombuffer(content, np.uint8) for content in self._content]
        self._ports: list[AxiPort] = []
        self._windows: list[AxiMaster] = []
        logging.getLogger(f"cocotb.{dut._name}").setLevel(logging.WARNING)  # every access

    @property
    def regions(self) -> Sequence[tuple[int, int]]:
        size = self.config.memory_bytes
        return tuple((device * size, size) for device in range(self.devices))

    async def begin(self) -> None:
        """Start the clock and the models, and reset the devices."""
        dut = self._dut
        dut.rst.value = 1
        dut.i_outside.value = 0
        cocotb.start_soon(Clock(dut.clk, 5, unit="ns").start())
        names = {"bus_separator": "__", "case_insensitive": False}
        for number in range(self.devices):
            bus = AxiBus.from_prefix(dut, f"m_axi{number}", **names)
            ram = AxiRam(bus, dut.clk, dut.rst, mem=self._content[number])
            if self._mode in ("source", "both"):
                ram.read_if.r_channel.set_pause_generator(self._pauses())
                ram.write_if.b_channel.set_pause_generator(self._pauses())
            if self._mode in ("sink", "both"):
                ram.read_if.ar_channel.set_pause_generator(self._pauses())
                ram.write_if.aw_channel.set_pause_generator(self._pauses())
                ram.write_if.w_channel.set_pause_generator(self._pauses())
            ids = 1 << len(getattr(dut, f"m_axi{number}__arid"))
            checker = AxiChecker(beat_bytes=BEAT_BYTES, read_ids=ids, write_ids=ids)
            self.checkers.append(checker)
            port = AxiPort(dut, f"m_axi{number}", checker=checker)
            cocotb.start_soon(port.run())
            window = AxiBus.from_prefix(dut, f"s_axi{number}", **names)
            self._windows.append(AxiMaster(window, dut.clk, dut.rst))
            for name in ("read", "write"):
                getattr(dut, f"csr{number}__{name}").value = 0
        await self._reset()

    @property
    def cycles(self) -> int | None:
        return int(self.checkers[0].cycles)

    def read_register(self, address: int) -> int:
        return int(resume(self._access)(address, None))

    def write_register(self, address: int, value: int) -> None:
        resume(self._access)(address, value)

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        resume(self._load)(address, out)

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        resume(self._store)(address, data)

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        resume(self._wait)(polls, max_cycles)

    def reset(self) -> None:
        resume(self._reset)()

    def close(self) -> None:
        """Do nothing: the simulator outlives the devices."""

    def _pauses(self) -> Iterator[bool]:
        return (self._random.random() < 0.4 for _ in itertools.count())

    async def _reset(self) -> None:
        self._dut.rst.value = 1
        await ClockCycles(self._dut.clk, RESET_CYCLES)
        self._dut.rst.value = 0
        await ClockCycles(self._dut.clk, 2)

    async def _access(self, address: int, value: int | None) -> int:
        number, offset = divmod(address, self._register_bytes)
        port = {
            name: getattr(self._dut, f"csr{number}__{name}")
            for name in ("address", "read", "write", "write_data", "write_mask", "ack", "error")
        }
        request = port["read" if value is None else "write"]
        port["address"].value = offset
        port["write_data"].value = value or 0
        port["write_mask"].value = 0xF
        request.value = 1
        await RisingEdge(self._dut.clk)
        request.value = 0
        await RisingEdge(self._dut.clk)
        assert port["ack"].value, "a register access is answered in the next cycle"
        if port["error"].value:
            raise BusError(address, int(Response.SLVERR.value), write=value is not None)
        word = int(getattr(self._dut, f"csr{number}__read_data").value)
        await RisingEdge(self._dut.clk)
        return word

    async def _load(self, address: int, out: NDArray[np.uint8]) -> None:
        number, offset = divmod(address, self.config.memory_bytes)
        answer = await self._windows[number].read(offset, out.size)
        if answer.resp:
            raise CompletionError(address, RESPONSES[int(answer.resp)])
        out[:] = np.frombuffer(answer.data, np.uint8)

    async def _store(self, address: int, data: NDArray[np.uint8]) -> None:
        if not data.size:
            return
        number, offset = divmod(address, self.config.memory_bytes)
        answer = await self._windows[number].write(offset, data.tobytes())
        if answer.resp:
            raise PostedWriteError(address, RESPONSES[int(answer.resp)])

    async def _wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        limit = self.checkers[0].cycles + max_cycles
        while True:
            for poll in polls:
                if poll.holds(await self._access(poll.address, None)):
                    return
            if self.checkers[0].cycles >= limit:
                raise WaitTimeoutError(" or ".join(map(str, polls)), max_cycles)
            await ClockCycles(self._dut.clk, POLL_CYCLES)
