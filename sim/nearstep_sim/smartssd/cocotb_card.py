"""The host's driver on a card in cocotb: backends that are the host, behind PCIe or at its ports.

The driver is synchronous; run it in a thread that cocotb bridges::

    backend = CocotbCardBackend(dut, config, mode="both", seed=1)
    await backend.begin()
    await cocotb.task.bridge(job)(drive(backend, "cocotb:smartssd"))
"""

from __future__ import annotations

import logging
import mmap
import random
from abc import abstractmethod
from collections.abc import Sequence

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.handle import HierarchyObject
from cocotb.task import resume
from cocotb.triggers import ClockCycles, Event, First, RisingEdge
from cocotbext.axi import AxiBus, AxiMaster, AxiRam
from cocotbext.pcie.core.tlp import CplStatus, Tlp, TlpType
from cocotbext.pcie.core.utils import PcieId
from numpy.typing import NDArray

from nearstep.backends.base import Backend, Poll
from nearstep.errors import (
    BusError,
    CompletionError,
    DeviceError,
    PostedWriteError,
    WaitTimeoutError,
)
from nearstep_hw.axi.signature import Response
from nearstep_sim.bench.axi_checker import AxiChecker
from nearstep_sim.bench.cocotb_axi import AxiPort
from nearstep_sim.bench.cocotb_pcie import (
    CARD_CLOCK_NS,
    STALLS,
    PcieSystem,
    pauses,
    stall_memory,
)
from nearstep_spec.csr.model import WORD_BYTES
from nearstep_spec.smartssd.config import SmartssdConfig

GUARD = 0xA5
"""Every byte of memory before a test, and of that beyond the BAR's end after it."""

SETTLE_CYCLES = 50
RESET_CYCLES = 3
ACCESS_CYCLES = 16
"""A register access that takes longer has hung."""

LARGEST_BAR = 1 << 31
"""The memory BAR is twice the memory, half of it an address of nothing, but no larger than this:
cocotbext-pcie finds no BAR whose lower half decodes nothing."""

LARGEST_PEER = 1 << 20
"""Memory of the other device, which is not used."""

MOST_GUARDED = 1 << 26
"""Largest address space of a card that is filled with `GUARD`; a larger one is zeros that take no
space, and only writes beyond the memory are detected."""


class GuardWrittenError(AssertionError):
    """A byte beyond the memory of a card was written."""

    def __init__(self, address: int, actual: int) -> None:
        self.address = address
        self.actual = actual
        super().__init__(
            f"byte at {address:#x}, beyond the memory, must be {GUARD:#x}, not {actual:#x}"
        )


class _CocotbCard(Backend):
    """Base of cards in cocotb, for any port of the host: the memory of cocotbext-axi, with a
    checker, and a wait that sleeps until the card interrupts.

    All methods but `begin` and `finish` are called from a bridged thread.
    """

    def __init__(self, dut: HierarchyObject, config: SmartssdConfig, mode: str, seed: int) -> None:
        kernel = config.kernel
        self.family = "smartssd"
        self.config = config
        self.capacity_bytes = config.memory_bytes
        self.interrupts = 0
        self._dut = dut
        self._mode = mode
        self._random = random.Random(f"{seed} {mode}")
        size = 1 << kernel.address_width
        self._guarded = size <= MOST_GUARDED
        self._content: bytearray | mmap.mmap
        if self._guarded:
            self._content = bytearray([GUARD]) * size
        else:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            self._content = mmap.mmap(-1, size, flags=flags)
        self.memory = np.frombuffer(self._content, np.uint8)
        bus = AxiBus.from_prefix(dut, "m_axi", bus_separator="__", case_insensitive=False)
        self._ram = AxiRam(bus, dut.clk, dut.rst, mem=self._content)
        self._beyond: list[tuple[int, int]] = []  # address and first byte of writes
        self._watch_writes()
        ids = 1 << len(dut.m_axi__arid)
        self.checker = AxiChecker(beat_bytes=kernel.beat_bytes, read_ids=ids, write_ids=ids)
        self._port = AxiPort(dut, "m_axi", checker=self.checker)
        self._interrupted = Event()

    def _watch_writes(self) -> None:
        write = self._ram.write_if._write

        async def watched(address: int, data: bytes) -> None:
            if address + len(data) > self.capacity_bytes:
                self._beyond.append((address, data[0]))
            await write(address, data)

        self._ram.write_if._write = watched

    async def finish(self) -> int:
        """End a test; check that no access is in flight, and that none was beyond the memory.

        Returns
        -------
        int : number of checks: transfers of memory, and the guard.

        Raises
        ------
        ProtocolError, GuardWrittenError
        """
        await ClockCycles(self._dut.clk, SETTLE_CYCLES)
        self.checker.finish()
        self.check_guard()
        return sum(self.checker.transfers.values()) + 1

    def check_guard(self) -> None:
        """Raise `GuardWrittenError` if anything beyond the memory was written."""
        for at, byte in self._beyond:
            raise GuardWrittenError(at, byte)
        if not self._guarded:
            return
        beyond = self.memory[self.capacity_bytes :]
        written = np.flatnonzero(beyond != GUARD)
        if written.size:
            at = self.capacity_bytes + int(written[0])
            raise GuardWrittenError(at, int(self.memory[at]))

    @property
    def cycles(self) -> int | None:
        return int(self.checker.cycles)

    def read_register(self, address: int) -> int:
        return int(resume(self._read)(address))

    def write_register(self, address: int, value: int) -> None:
        resume(self._write)(address, value)

    def read_memory(self, address: int, out: NDArray[np.uint8]) -> None:
        out[:] = np.frombuffer(resume(self._read_memory)(address, out.size), np.uint8)

    def write_memory(self, address: int, data: NDArray[np.uint8]) -> None:
        resume(self._write_memory)(address, data.tobytes())

    def wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        resume(self._wait)(polls, max_cycles)

    def close(self) -> None:
        """Do nothing: the simulator outlives the device."""

    @abstractmethod
    async def _read(self, address: int) -> int: ...

    @abstractmethod
    async def _write(self, address: int, value: int) -> None: ...

    @abstractmethod
    async def _read_memory(self, address: int, size: int) -> bytes: ...

    @abstractmethod
    async def _write_memory(self, address: int, data: bytes) -> None: ...

    async def _handle(self) -> None:
        self.interrupts += 1
        self._interrupted.set()

    async def _wait(self, polls: Sequence[Poll], max_cycles: int) -> None:
        limit = self.checker.cycles + max_cycles
        while True:
            self._interrupted.clear()
            for poll in polls:
                if poll.holds(await self._read(poll.address)):
                    return
            left = limit - self.checker.cycles
            if left <= 0:
                raise WaitTimeoutError(" or ".join(map(str, polls)), max_cycles)
            await First(self._interrupted.wait(), ClockCycles(self._dut.clk, left))


class CocotbCardBackend(_CocotbCard):
    """A `PcieCard` or `Series7Card` below a root complex, with cocotbext-axi's memory and checkers.

    Registers are dwords of BAR 0, memory is read and written through the memory BAR, and a wait
    sleeps until the card interrupts. Each write of a register is followed by a read, after which
    the card's counters show whether the write failed. `system.peer` can access the card too.

    Parameters
    ----------
    dut : the card.
    config : its configuration.
    width, crossed : as of the card.
    series7 : the card is a `Series7Card`.
    mode : which streams stall, see `STALLS`.
    seed : of the stalls.

    Attributes
    ----------
    system : host and peer.
    memory : direct access to all that the card can address.
    interrupts : number of interrupts that the host has handled.
    """

    def __init__(
        self,
        dut: HierarchyObject,
        config: SmartssdConfig,
        *,
        width: int = 128,
        crossed: bool = False,
        series7: bool = False,
        mode: str = "free",
        seed: int = 1,
    ) -> None:
        super().__init__(dut, config, mode, seed)
        self.system = PcieSystem(
            dut,
            width=width,
            vectors=1,
            bar_bytes=min(2 * config.memory_bytes, LARGEST_BAR),
            peer_bytes=min(config.memory_bytes, LARGEST_PEER),
            crossed=crossed,
            series7=series7,
        )
        self._failures = 0

    async def begin(self) -> None:
        """Reset and enumerate the card, and install the interrupt's handler."""
        cocotb.start_soon(self._port.run())
        await self.system.power_up()
        self.system.stall(self._mode, self._ram, self._random)
        await self.system.enumerate()
        host = self.system.host
        vectors = await host.alloc_irq_vectors(1, 1)
        if vectors != 1:
            raise RuntimeError(f"the card has {vectors} vectors, expected 1")
        host.request_irq(0, self._handle)

    async def finish(self) -> int:
        return int(self.system.monitor.checks) + await super().finish()

    def reset(self) -> None:
        """Raise `DeviceError`: the models cannot reset a card alone."""
        raise DeviceError("a card below a root complex is not reset alone")

    def refused(self, address: int) -> CplStatus:
        """The status with which a read of one dword of the memory BAR is answered."""
        return resume(self._status)(self.system.base + address)

    async def _status(self, address: int) -> CplStatus:
        tlp = Tlp()
        tlp.fmt_type = TlpType.MEM_READ_64
        tlp.requester_id = PcieId(0, 0, 0)
        tlp.set_addr_be(address, WORD_BYTES)
        (completion,) = await self.system.rc.perform_nonposted_operation(tlp)
        return completion.status

    def _failed(self) -> bool:
        """Return whether a write before the last read has failed since the last call."""
        before = self._failures
        self._failures = int(self._dut.o_failed_writes.value) + int(self._dut.o_dropped.value)
        return self._failures != before

    async def _read(self, address: int) -> int:
        try:
            return int(await self.system.registers.read_dword(address))
        except Exception as error:  # the models have no class for it
            raise BusError(address, Response.SLVERR.value, write=False) from error

    async def _write(self, address: int, value: int) -> None:
        await self.system.registers.write_dword(address, value)
        await self._read(0)
        if self._failed():
            raise BusError(address, Response.SLVERR.value, write=True)

    async def _read_memory(self, address: int, size: int) -> bytes:
        try:
            return bytes(await self.system.bar.read(address, size))
        except Exception as error:  # the models have no class for it
            raise CompletionError(address, "unsuccessful") from error

    async def _write_memory(self, address: int, data: bytes) -> None:
        await self.system.bar.write(address, data)
        await self._read(0)
        if self._failed():
            raise PostedWriteError(address, "dropped")


class CocotbPortsBackend(_CocotbCard):
    """A `SmartssdCard` by itself: the host is at its register port, and at that of the memory BAR
    with the master of cocotbext-axi.

    Responses of the card are never stalled, as the card requires. Arrays begin on a beat.

    Parameters
    ----------
    dut : the card.
    config : its configuration.
    mode : which streams stall, see `STALLS`: those of the memory's answers and of the host's
        requests are sources, those of the card's requests are sinks.
    seed : of the stalls.

    Attributes
    ----------
    memory : direct access to all that the card can address.
    interrupts : number of interrupts of the card.
    """

    def __init__(
        self, dut: HierarchyObject, config: SmartssdConfig, *, mode: str = "free", seed: int = 1
    ) -> None:
        super().__init__(dut, config, mode, seed)
        logging.getLogger(f"cocotb.{dut._name}").setLevel(logging.ERROR)  # every burst
        bus = AxiBus.from_prefix(dut, "s_axi", bus_separator="__", case_insensitive=False)
        self._host = AxiMaster(bus, dut.clk, dut.rst)

    async def begin(self) -> None:
        """Start the clock, reset the card, and listen for interrupts."""
        dut = self._dut
        for name in ("read", "write", "address", "write_data", "write_mask"):
            getattr(dut, f"csr__{name}").value = 0
        dut.rst.value = 1
        cocotb.start_soon(Clock(dut.clk, CARD_CLOCK_NS, unit="ns").start())
        cocotb.start_soon(self._port.run())
        stall_memory(self._mode, self._ram, self._random)
        if self._mode in ("source", "both"):
            write, read = self._host.write_if, self._host.read_if
            for channel in (write.aw_channel, write.w_channel, read.ar_channel):
                channel.set_pause_generator(pauses(STALLS[self._mode], self._random))
        await ClockCycles(dut.clk, RESET_CYCLES)
        dut.rst.value = 0
        await ClockCycles(dut.clk, 2)
        cocotb.start_soon(self._listen())

    def reset(self) -> None:
        """Raise `DeviceError`: the models cannot be reset with the card."""
        raise DeviceError("a card in cocotb is not reset")

    async def _listen(self) -> None:
        while True:
            await RisingEdge(self._dut.clk)
            if self._dut.o_interrupt.value:
                await self._handle()

    async def _access(self, address: int, value: int | None) -> int:
        """Read or write a word; the models have no register port."""
        dut = self._dut
        write = value is not None
        dut.csr__address.value = address
        dut.csr__write_data.value = value or 0
        dut.csr__write_mask.value = (1 << WORD_BYTES) - 1
        strobe = dut.csr__write if write else dut.csr__read
        strobe.value = 1
        await RisingEdge(dut.clk)
        strobe.value = 0
        for _ in range(ACCESS_CYCLES):
            await RisingEdge(dut.clk)
            if dut.csr__ack.value:
                if dut.csr__error.value:
                    raise BusError(address, Response.SLVERR.value, write=write)
                return int(dut.csr__read_data.value)
        raise DeviceError(f"register {address:#x} did not answer in {ACCESS_CYCLES} cycles")

    async def _read(self, address: int) -> int:
        return await self._access(address, None)

    async def _write(self, address: int, value: int) -> None:
        await self._access(address, value)

    async def _read_memory(self, address: int, size: int) -> bytes:
        answer = await self._host.read(address, size)
        if answer.resp:
            raise CompletionError(address, Response(int(answer.resp)).name)
        return bytes(answer.data)

    async def _write_memory(self, address: int, data: bytes) -> None:
        answer = await self._host.write(address, data)
        if answer.resp:
            raise PostedWriteError(address, Response(int(answer.resp)).name)
