"""What the benches of the endpoint share: root complex, switch, peer, card, memory, mirror."""

import json
import os
import random

import cocotb
import numpy as np
from cocotb.triggers import ClockCycles
from cocotbext.axi import AxiBus, AxiRam
from cocotbext.pcie.core.tlp import CplStatus, Tlp, TlpType
from cocotbext.pcie.core.utils import PcieId
from cocotbext.pcie.xilinx.us.tlp import Tlp_us
from endpoint_block import BlockConfig, block_map

from nearstep_sim.bench.axi_checker import AxiChecker
from nearstep_sim.bench.cocotb_axi import AxiPort
from nearstep_sim.bench.cocotb_pcie import STALLS, PcieSystem
from nearstep_spec.pcie import MEMORY_BAR, REGISTER_BAR, REGISTER_BYTES

CONFIG = BlockConfig(**json.loads(os.environ["NEARSTEP_CONFIG"]))
SEED = int(os.environ.get("NEARSTEP_SEED", "1"))
MODES = tuple(STALLS)


class PcieBench(PcieSystem):
    """A card with the endpoint, and a peer, below a switch below a root complex.

    Memory of the card is filled with words that are all different; `mirror` is what it should be.
    """

    def __init__(self, dut: object, *, mode: str = "free", max_payload: int = 256) -> None:
        super().__init__(
            dut,
            width=CONFIG.width,
            vectors=CONFIG.vectors,
            bar_bytes=CONFIG.bar_bytes,
            crossed=CONFIG.crossed,
            max_payload=max_payload,
            series7=CONFIG.series7,
        )
        self.mode = mode
        self.random = random.Random(f"{SEED} {mode}")
        self.map = block_map()
        self.checks = 0
        self.max_payload = max_payload
        self.read_faults: set[int] = set()  # beats of memory that answer with an error
        self.write_faults: set[int] = set()
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

    async def begin(self) -> None:
        """Reset, enumeration, bus masters."""
        cocotb.start_soon(self.port.run())
        await self.power_up()
        self.stall(self.mode, self.ram, self.random)
        await self.enumerate()

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
        """Put a request into the hard block as if it had come from the link.

        The link model lets no malformed request pass.
        """
        tlp.bar_id, size = REGISTER_BAR, REGISTER_BYTES
        if tlp.address >= self.base:
            tlp.bar_id, size = MEMORY_BAR, CONFIG.bar_bytes
        tlp.bar_aperture = (size - 1).bit_length()
        tlp.completer_id = self.function.pcie_id
        tlp.ep = tlp.discontinue  # what the block of the 7 series has for it
        self.card.cq_queue.put_nowait(tlp)

    async def exchange(self, tlp: Tlp_us) -> list[Tlp]:
        """Post a request that is answered; its completions, each checked against the request."""
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
        """Post a request that must be answered once, with `status`."""
        (answer,) = await self.exchange(tlp)
        assert answer.status == status, f"{answer!r} to {tlp!r}"
        if not self.series7:
            copy = self.monitor.packets[-1].dwords[3:]
            frame = tlp.pack_us_cq()
            assert copy == (tlp.first_be | tlp.last_be << 4, *frame.data[:4]), "copy of the request"
        self.checks += 1

    async def accepted(self, tlp: Tlp_us) -> bytes:
        """Post a read that must be answered with data; the bytes that are enabled, and 0."""
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
