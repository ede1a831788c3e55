"""What the benches of the endpoint share: root complex, switch, peer, card, memory, mirror."""

import json
import logging
import os
import random
from collections.abc import Iterator
from itertools import repeat

import cocotb
import numpy as np
from cc_monitor import CcMonitor
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, FallingEdge, ReadOnly, RisingEdge
from cocotbext.axi import AxiBus, AxiRam, AxiStreamBus
from cocotbext.pcie.core import Device, MemoryEndpoint, RootComplex, Switch
from cocotbext.pcie.core.tlp import CplStatus, Tlp, TlpType
from cocotbext.pcie.core.utils import PcieId
from cocotbext.pcie.xilinx.us import UltraScalePlusPcieDevice
from cocotbext.pcie.xilinx.us.tlp import Tlp_us
from endpoint_block import BlockConfig, block_map

from nearstep_hw.pcie.layout import (
    MEMORY_BAR,
    MSIX_PBA_OFFSET,
    MSIX_TABLE_OFFSET,
    REGISTER_BAR,
    REGISTER_BYTES,
)
from nearstep_sim.bench.axi_checker import AxiChecker
from nearstep_sim.bench.cocotb_axi import AxiPort

CONFIG = BlockConfig(**json.loads(os.environ["NEARSTEP_CONFIG"]))
SEED = int(os.environ.get("NEARSTEP_SEED", "1"))
LINKS = {64: (3, 2), 128: (3, 4), 256: (3, 8), 512: (3, 16)}  # generation and lanes, at 250 MHz
MODES = ("free", "source", "sink", "both")
PEER_BYTES = 4096
CARD_CLOCK_NS = 5  # 200 MHz, if the card has a clock of its own


class NeverValue:
    """Stands for `pcie_cq_np_req` where the model looks: the bench counts credits itself.

    The model would miss those that come while it waits for the CQ stream.
    """

    value = 0


class PcieBench:
    """A card with the endpoint, and a peer, below a switch below a root complex.

    Memory of the card is filled with words that are all different; `mirror` is what it should be.
    """

    def __init__(self, dut: object, *, mode: str = "free", max_payload: int = 256) -> None:
        self.dut = dut
        self.mode = mode
        self.random = random.Random(f"{SEED} {mode}")
        self.map = block_map()
        self.checks = 0
        self.max_payload = max_payload
        self.read_faults: set[int] = set()  # beats of memory that answer with an error
        self.write_faults: set[int] = set()
        for name in ("pcie", dut._name):  # every packet, every burst
            logging.getLogger(f"cocotb.{name}").setLevel(logging.ERROR)

        self.clock, self.reset = dut.clk, dut.rst
        if CONFIG.crossed:
            self.clock, self.reset = dut.pcie_clk, dut.pcie_rst
        generation, lanes = LINKS[CONFIG.width]
        self.rc = RootComplex()
        self.rc.max_payload_size = (max_payload // 128 - 1).bit_length()
        self.rc.max_read_request_size = 5  # 4 KiB
        self.card = UltraScalePlusPcieDevice(
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
            pf0_msix_table_size=CONFIG.vectors - 1,
            pf0_msix_table_bir=REGISTER_BAR,
            pf0_msix_table_offset=MSIX_TABLE_OFFSET,
            pf0_msix_pba_bir=REGISTER_BAR,
            pf0_msix_pba_offset=MSIX_PBA_OFFSET,
            **{
                f"cfg_interrupt_msix_{name}": getattr(dut, f"cfg_interrupt_msix__{name}")
                for name in ("enable", "mask", "int", "address", "data", "sent", "fail")
            },
        )
        self.card.pcie_cq_np_req = NeverValue()
        self.credits = 0
        self.function = self.card.functions[0]
        self.function.configure_bar(REGISTER_BAR, REGISTER_BYTES)
        self.function.configure_bar(MEMORY_BAR, CONFIG.bar_bytes, ext=True, prefetch=True)
        self.peer = MemoryEndpoint()
        self.peer.add_mem_region(PEER_BYTES)
        switch = Switch()
        self.rc.make_port().connect(switch)
        switch.make_port().connect(self.card)
        switch.make_port().connect(Device(self.peer))
        dut.i_interrupt.value = 0

        size = 1 << CONFIG.address_width
        words = np.random.default_rng(SEED).permutation(size // 4).astype(np.uint32)
        content = bytearray(words.tobytes())
        bus = AxiBus.from_prefix(dut, "m_axi", bus_separator="__", case_insensitive=False)
        self.ram = AxiRam(bus, dut.clk, dut.rst, mem=content)
        self._inject_faults()
        self.memory = np.frombuffer(content, np.uint8)
        self.mirror = self.memory.copy()
        beat_bytes = CONFIG.data_width // 8
        self.checker = AxiChecker(beat_bytes=beat_bytes, read_ids=1, write_ids=1)
        self.monitor = CcMonitor(dut, self.clock, self.reset)
        self.port = AxiPort(dut, "m_axi", checker=self.checker)

    def _inject_faults(self) -> None:
        read, write = self.ram.read_if._read, self.ram.write_if._write

        async def faulty_read(address: int, length: int) -> bytes:
            if address // (CONFIG.data_width // 8) in self.read_faults:
                raise RuntimeError("fault")
            return await read(address, length)

        async def faulty_write(address: int, data: bytes) -> None:
            if address // (CONFIG.data_width // 8) in self.write_faults:
                raise RuntimeError("fault")
            await write(address, data)

        self.ram.read_if._read = faulty_read
        self.ram.write_if._write = faulty_write

    async def _follow_reset(self) -> None:
        """Gives the card the reset of the hard block, until it has seen it."""
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

    def pauses(self, chance: float) -> Iterator[bool]:
        rng = random.Random(self.random.random())
        return (rng.random() < chance for _ in repeat(None))

    def _stall(self) -> None:
        chance = {"free": 0.0, "source": 0.6, "sink": 0.6, "both": 0.4}[self.mode]
        write, read = self.ram.write_if, self.ram.read_if
        channels = {
            "source": (self.card.cq_source, read.r_channel, write.b_channel),
            "sink": (self.card.cc_sink, read.ar_channel, write.aw_channel, write.w_channel),
        }
        for kind, members in channels.items():
            if self.mode in (kind, "both"):
                for channel in members:
                    channel.set_pause_generator(self.pauses(chance))

    async def begin(self) -> None:
        """Reset, enumeration, bus masters, MSI-X vectors."""
        dut = self.dut
        if CONFIG.crossed:
            cocotb.start_soon(Clock(dut.clk, CARD_CLOCK_NS, unit="ns").start())
            cocotb.start_soon(self._follow_reset())
        for task in (self.monitor.run(), self.port.run(), self._count_credits()):
            cocotb.start_soon(task)
        await RisingEdge(self.reset)
        while self.reset.value or dut.rst.value:
            await RisingEdge(dut.clk)
        self._stall()
        await self.rc.enumerate()
        self.host = self.rc.find_device(self.function.pcie_id)
        await self.host.enable_device()
        await self.host.set_master()
        peer = self.rc.find_device(self.peer.pcie_id)
        await peer.enable_device()
        await peer.set_master()
        self.registers = self.host.bar_window[REGISTER_BAR]
        self.bar = self.host.bar_window[MEMORY_BAR]
        self.register_base = self.host.bar_addr[REGISTER_BAR]
        self.base = self.host.bar_addr[MEMORY_BAR]
        self.monitor.max_payload = 128 << self.function.pcie_cap.max_payload_size

    # Memory through the host's window

    async def write(self, offset: int, data: bytes) -> None:
        await self.bar.write(offset, data)
        self.mirror[offset : offset + len(data)] = np.frombuffer(data, np.uint8)

    async def read(self, offset: int, length: int) -> None:
        """A read of the host, compared with the mirror as it is now."""
        expected = self.mirror[offset : offset + length].tobytes()
        data = await self.bar.read(offset, length)
        assert bytes(data) == expected, f"{length} bytes at {offset:#x}"
        self.checks += length

    async def settle(self) -> None:
        """Until every write is done: a read over the link comes back behind them."""
        await self.bar.read(0, 1)

    async def compare(self) -> None:
        """All of memory against the mirror, guard included."""
        await self.settle()
        different = np.flatnonzero(self.memory != self.mirror)
        assert not different.size, f"{different.size} bytes differ, first {different[:8]}"
        self.checks += self.memory.size

    async def finish(self) -> None:
        await self.compare()
        await ClockCycles(self.dut.clk, 50)
        self.checker.finish()
        assert self.monitor.checks > 0
        cocotb.log.info(
            "%s: %d checks, %d completions, %s",
            self.mode, self.checks, self.monitor.checks, self.checker.transfers,
        )  # fmt: skip

    # Single requests

    def request(
        self,
        kind: TlpType,
        address: int,
        dwords: int,
        *,
        first: int = 0xF,
        last: int | None = None,
        data: bytes = b"",
    ) -> Tlp_us:
        tlp = Tlp_us()
        tlp.fmt_type = kind
        tlp.requester_id = PcieId(0, 0, 0)
        tlp.address = address
        tlp.first_be = first
        tlp.last_be = (0xF if dwords > 1 else 0) if last is None else last
        tlp.tc = self.random.randrange(8)
        tlp.attr = self.random.randrange(8)
        if data:
            tlp.set_data(data)
        tlp.length = dwords
        return tlp

    def post(self, tlp: Tlp_us) -> None:
        """Puts a request into the hard block as if it had come from the link.

        The link model lets no malformed request pass.
        """
        tlp.bar_id, size = REGISTER_BAR, REGISTER_BYTES
        if tlp.address >= self.base:
            tlp.bar_id, size = MEMORY_BAR, CONFIG.bar_bytes
        tlp.bar_aperture = (size - 1).bit_length()
        tlp.completer_id = self.function.pcie_id
        self.card.cq_queue.put_nowait(tlp)

    async def exchange(self, tlp: Tlp_us) -> list[Tlp]:
        """Posts a request that is answered; its completions, each checked against the request."""
        tlp.tag = await self.rc.alloc_tag()
        self.post(tlp)
        completions: list[Tlp] = []
        while True:
            answer = await self.rc.recv_cpl(tlp.tag, 200, "us")
            assert answer is not None, f"no completion for {tlp!r}"
            assert answer.requester_id == tlp.requester_id
            assert answer.completer_id == self.function.pcie_id
            assert (answer.tc, answer.attr) == (tlp.tc, tlp.attr)
            completions.append(answer)
            self.checks += 1
            if answer.status != CplStatus.SC:
                break
            if answer.byte_count <= answer.length * 4 - (answer.lower_address & 3):
                break
        self.rc.release_tag(tlp.tag)
        return completions

    async def refused(self, tlp: Tlp_us, status: CplStatus) -> None:
        """Posts a request that must be answered once, with `status`."""
        (answer,) = await self.exchange(tlp)
        assert answer.status == status, f"{answer!r} to {tlp!r}"
        copy = self.monitor.packets[-1].dwords[3:]
        frame = tlp.pack_us_cq()
        assert copy == (tlp.first_be | tlp.last_be << 4, *frame.data[:4]), "copy of the request"
        self.checks += 1

    async def accepted(self, tlp: Tlp_us) -> bytes:
        """Posts a read that must be answered with data; the bytes that are enabled, and 0."""
        data = bytearray()
        left = max(tlp.get_be_byte_count(), 1) if tlp.first_be else 1
        at = tlp.address + (tlp.get_first_be_offset() if tlp.first_be else 0)
        for answer in await self.exchange(tlp):
            assert answer.status == CplStatus.SC, f"{answer!r} to {tlp!r}"
            assert (answer.byte_count, answer.lower_address) == (left, at & 0x7F), f"{answer!r}"
            data += answer.get_data()
            left -= 4 * answer.length - (at & 3)
            at += 4 * answer.length - (at & 3)
            self.checks += 1
        assert len(data) == 4 * tlp.length
        return bytes(
            byte if enabled else 0 for byte, enabled in zip(data, enables(tlp), strict=True)
        )

    async def register(self, name: str) -> int:
        return await self.registers.read_dword(self.map[name].offset)

    def register_read(self, offset: int, dwords: int = 1, **enable: int) -> Tlp_us:
        return self.request(TlpType.MEM_READ, self.register_base + offset, dwords, **enable)

    def register_write(self, offset: int, data: bytes, **enable: int) -> Tlp_us:
        address = self.register_base + offset
        return self.request(TlpType.MEM_WRITE, address, len(data) // 4, data=data, **enable)

    def memory_read(self, offset: int, dwords: int = 1, **enable: int) -> Tlp_us:
        return self.request(TlpType.MEM_READ_64, self.base + offset, dwords, **enable)

    def memory_write(self, offset: int, data: bytes, **enable: int) -> Tlp_us:
        address = self.base + offset
        return self.request(TlpType.MEM_WRITE_64, address, len(data) // 4, data=data, **enable)


def enables(tlp: Tlp) -> list[bool]:
    """Whether each byte of a request's dwords is enabled."""
    masks = [tlp.first_be, *[0xF] * (tlp.length - 2), *[tlp.last_be] * (tlp.length > 1)]
    return [bool(mask >> byte & 1) for mask in masks for byte in range(4)]
