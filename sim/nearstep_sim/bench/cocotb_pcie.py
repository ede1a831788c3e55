"""A PCIe host and another device around a design with the ports of a `PcieEndpoint`, in cocotb.

Also for the ports of a `Series7Adapter`.
"""

import logging
import random
from collections.abc import Iterator
from itertools import repeat

import cocotb
from cocotb.clock import Clock
from cocotb.handle import HierarchyObject
from cocotb.triggers import ClockCycles, FallingEdge, ReadOnly, RisingEdge
from cocotbext.axi import AxiRam, AxiStreamBus
from cocotbext.pcie.core import Device, MemoryEndpoint, RootComplex, Switch
from cocotbext.pcie.xilinx.us import UltraScalePlusPcieDevice

from nearstep_sim.bench.cc_monitor import CcMonitor
from nearstep_sim.bench.series7_block import Series7PcieDevice
from nearstep_spec.pcie import (
    MEMORY_BAR,
    MSIX_PBA_OFFSET,
    MSIX_TABLE_OFFSET,
    REGISTER_BAR,
    REGISTER_BYTES,
)

LINKS = {64: (3, 2), 128: (3, 4), 256: (3, 8), 512: (3, 16)}  # generation and lanes, at 250 MHz
STALLS = {"free": 0.0, "source": 0.6, "sink": 0.6, "both": 0.4}
"""Modes of a bench, and the probability of a stall in a cycle."""

CARD_CLOCK_NS = 5  # 200 MHz, if the card's clock is separate
MAX_READ_REQUEST = 5  # code of 4 KiB
HEARD_CYCLES = 8  # of the card: delay of a configuration through block and synchronisers


class NeverValue:
    """Replaces `pcie_cq_np_req` in the model, which would miss credits while it waits for CQ."""

    value = 0


class PcieSystem:
    """The hard block of a card, and a peer, below a switch below a root complex.

    Parameters
    ----------
    dut : the card.
    width : bits of CQ and CC.
    vectors : of MSI-X.
    bar_bytes : size of the memory BAR.
    peer_bytes : memory of the peer.
    crossed : the hard block has a separate clock, `pcie_clk`.
    max_payload : bytes that the host allows.
    series7 : the hard block is of the 7 series.

    Attributes
    ----------
    rc, card, function, peer : the models: root complex, hard block and its function, peer.
    clock, reset : of the hard block.
    monitor : checks CC, or the transmit stream.
    credits : credits given by the card for non-posted requests; 0 with `series7`.
    host : the host's handle of the card.
    registers, bar : windows of the host on BAR 0 and on memory.
    register_base, base : bus addresses of registers and memory.
    """

    def __init__(
        self,
        dut: HierarchyObject,
        *,
        width: int,
        vectors: int,
        bar_bytes: int,
        peer_bytes: int = 4096,
        crossed: bool = False,
        max_payload: int = 256,
        series7: bool = False,
    ) -> None:
        self.dut = dut
        self.crossed = crossed
        self.series7 = series7
        for name in ("pcie", dut._name):  # every packet, every burst
            logging.getLogger(f"cocotb.{name}").setLevel(logging.ERROR)
        self.clock, self.reset = dut.clk, dut.rst
        if crossed:
            self.clock, self.reset = dut.pcie_clk, dut.pcie_rst
        self.rc = RootComplex()
        self.rc.max_payload_size = (max_payload // 128 - 1).bit_length()
        self.rc.max_read_request_size = MAX_READ_REQUEST
        self.credits = 0
        if series7:
            self.card = self.monitor = Series7PcieDevice(
                dut,
                clock=self.clock,
                reset=self.reset,
                max_payload=1024,
                vectors=vectors,
                table=(REGISTER_BAR, MSIX_TABLE_OFFSET),
                pending=(REGISTER_BAR, MSIX_PBA_OFFSET),
            )
        else:
            self.card = self._ultrascale_plus(width, vectors)
            self.monitor = CcMonitor(dut, self.clock, self.reset)
        self.function = self.card.functions[0]
        self.function.configure_bar(REGISTER_BAR, REGISTER_BYTES)
        self.function.configure_bar(MEMORY_BAR, bar_bytes, ext=True, prefetch=True)
        self.peer = MemoryEndpoint()
        self.peer.add_mem_region(peer_bytes)
        switch = Switch()
        self.rc.make_port().connect(switch)
        switch.make_port().connect(self.card)
        switch.make_port().connect(Device(self.peer))

    def _ultrascale_plus(self, width: int, vectors: int) -> UltraScalePlusPcieDevice:
        generation, lanes = LINKS[width]
        dut = self.dut
        card = UltraScalePlusPcieDevice(
            pcie_generation=generation,
            pcie_link_width=lanes,
            user_clk_frequency=250e6,
            max_payload_size=1024,
            user_clk=self.clock,
            user_reset=self.reset,
            cq_bus=AxiStreamBus.from_prefix(dut, "m_axis_cq", bus_separator="__"),
            cc_bus=AxiStreamBus.from_prefix(dut, "s_axis_cc", bus_separator="__"),
            pcie_cq_np_req=dut.pcie_cq_np_req,
            cfg_max_payload=dut.cfg_max_payload,
            pf0_msix_enable=True,
            pf0_msix_table_size=vectors - 1,
            pf0_msix_table_bir=REGISTER_BAR,
            pf0_msix_table_offset=MSIX_TABLE_OFFSET,
            pf0_msix_pba_bir=REGISTER_BAR,
            pf0_msix_pba_offset=MSIX_PBA_OFFSET,
            **{
                f"cfg_interrupt_msix_{name}": getattr(dut, f"cfg_interrupt_msix__{name}")
                for name in ("enable", "mask", "int", "address", "data", "sent", "fail")
            },
        )
        card.pcie_cq_np_req = NeverValue()
        return card

    def stall(self, mode: str, ram: AxiRam, rng: random.Random) -> None:
        """Stall CQ and responses of `ram`, or CC and requests to `ram`, or both, at random."""
        for kind, stream in (("source", self.card.cq_source), ("sink", self.card.cc_sink)):
            if mode in (kind, "both"):
                stream.set_pause_generator(pauses(STALLS[mode], rng))
        stall_memory(mode, ram, rng)

    async def power_up(self) -> None:
        """Start clocks and monitors, and wait for the end of the reset."""
        dut = self.dut
        if self.crossed:
            cocotb.start_soon(Clock(dut.clk, CARD_CLOCK_NS, unit="ns").start())
            cocotb.start_soon(self._follow_reset())
        if not self.series7:
            for task in (self.monitor.run(), self._count_credits()):
                cocotb.start_soon(task)
        await RisingEdge(self.reset)
        while self.reset.value or dut.rst.value:
            await RisingEdge(dut.clk)

    async def enumerate(self) -> None:
        """Enumerate card and peer, and enable both as targets and as masters."""
        await self.rc.enumerate()
        self.host = self.rc.find_device(self.function.pcie_id)
        for device in (self.host, self.rc.find_device(self.peer.pcie_id)):
            await device.enable_device()
            await device.set_master()
        self.registers = self.host.bar_window[REGISTER_BAR]
        self.bar = self.host.bar_window[MEMORY_BAR]
        self.register_base = self.host.bar_addr[REGISTER_BAR]
        self.base = self.host.bar_addr[MEMORY_BAR]
        self.monitor.max_payload = 128 << self.function.pcie_cap.max_payload_size

    async def configured(self) -> None:
        """Wait until the host's configuration has reached the card.

        Configuration accesses take no time in the model; on a link they take longer than their
        propagation to the card.
        """
        await ClockCycles(self.dut.clk, HEARD_CYCLES)

    async def _follow_reset(self) -> None:
        """Reset the card through the hard block."""
        self.dut.rst.value = 1
        await RisingEdge(self.reset)
        await FallingEdge(self.reset)
        await ClockCycles(self.dut.clk, 4)
        self.dut.rst.value = 0

    async def _count_credits(self) -> None:
        while True:
            await RisingEdge(self.clock)
            await ReadOnly()
            if not self.reset.value and self.dut.pcie_cq_np_req.value:
                self.credits += 1
                self.card.cq_np_req_count += 1


def pauses(chance: float, rng: random.Random) -> Iterator[bool]:
    """Yield whether a stream stalls, cycle by cycle, from a separate random sequence."""
    own = random.Random(rng.random())
    return (own.random() < chance for _ in repeat(None))


def stall_memory(mode: str, ram: AxiRam, rng: random.Random) -> None:
    """Stall responses of `ram` (`source`), or requests to it (`sink`), or both, at random."""
    write, read = ram.write_if, ram.read_if
    channels = {
        "source": (read.r_channel, write.b_channel),
        "sink": (read.ar_channel, write.aw_channel, write.w_channel),
    }
    for kind, members in channels.items():
        if mode in (kind, "both"):
            for channel in members:
                channel.set_pause_generator(pauses(STALLS[mode], rng))
