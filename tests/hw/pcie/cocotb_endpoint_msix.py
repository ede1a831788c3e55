"""MSI-X from the request of the card to the host's handler."""

import cocotb
from cocotb.triggers import ClockCycles
from cocotbext.pcie.core.caps import PciCapId
from pcie_bench import CONFIG, MODES, PcieBench

from nearstep_spec.pcie import MSIX_PBA_OFFSET, MSIX_TABLE_OFFSET

VECTORS = CONFIG.vectors
EVERYTHING = (1 << VECTORS) - 1
LAST = VECTORS - 1
CYCLES = 400 + 100 * VECTORS  # for every vector to reach its handler, and more
ENABLE, FUNCTION_MASK = 0x8000, 0x4000


class Interrupts:
    """Vectors that the host has set up, and how often each handler ran."""

    def __init__(self, bench: PcieBench) -> None:
        self.bench = bench
        self.seen = [0] * VECTORS
        self.sent = [0] * VECTORS

    async def begin(self) -> None:
        bench = self.bench
        assert await bench.host.alloc_irq_vectors(VECTORS, VECTORS) == VECTORS
        for vector in range(VECTORS):

            async def handler(vector: int = vector) -> None:
                self.seen[vector] += 1

            bench.host.request_irq(vector, handler)

    async def request(self, mask: int) -> None:
        self.bench.dut.i_interrupt.value = mask
        await ClockCycles(self.bench.dut.clk, 1)
        self.bench.dut.i_interrupt.value = 0

    async def expect(self, mask: int, times: int = 1) -> None:
        """Each vector of `mask` is handled `times` more often, and no other."""
        for vector in range(VECTORS):
            self.sent[vector] += times * (mask >> vector & 1)
        await ClockCycles(self.bench.dut.clk, CYCLES)
        assert self.seen == self.sent
        self.bench.checks += VECTORS

    async def pending(self, mask: int) -> None:
        assert await self.bench.registers.read_qword(MSIX_PBA_OFFSET) == mask
        self.bench.checks += 1

    async def control(self, value: int) -> None:
        await self.bench.host.capability_write_word(PciCapId.MSIX, 2, value)
        await self.bench.configured()

    async def mask(self, vector: int, value: int) -> None:
        place = MSIX_TABLE_OFFSET + 16 * vector + 12
        await self.bench.registers.write_dword(place, value)
        assert await self.bench.registers.read_dword(place) == value


@cocotb.test()
@cocotb.parametrize(mode=list(MODES))
async def requests_reach_the_host(dut: object, mode: str) -> None:
    bench = PcieBench(dut, mode=mode)
    await bench.begin()
    interrupts = Interrupts(bench)
    await interrupts.begin()
    masks = range(1, EVERYTHING + 1)
    if VECTORS > 3:
        masks = [EVERYTHING, *(bench.random.randrange(1, EVERYTHING) for _ in range(6))]
    for mask in masks:
        await interrupts.request(mask)
        await interrupts.expect(mask)
        await interrupts.pending(0)
    for _ in range(3):  # before the first message has gone, a second request; the others merge
        await interrupts.request(1)
    await ClockCycles(dut.clk, CYCLES)
    assert 2 <= interrupts.seen[0] - interrupts.sent[0] <= 3
    await bench.finish()


@cocotb.test()
async def masked_vectors_are_pending(dut: object) -> None:
    bench = PcieBench(dut)
    await bench.begin()
    interrupts = Interrupts(bench)
    await interrupts.begin()
    for vector in sorted({0, VECTORS // 2, LAST}):
        await interrupts.mask(vector, 1)
        await interrupts.request(EVERYTHING)
        await interrupts.expect(EVERYTHING & ~(1 << vector))
        await interrupts.pending(1 << vector)
        await interrupts.request(1 << vector)
        await interrupts.mask(vector, 0)
        await interrupts.expect(1 << vector)
        await interrupts.pending(0)
    await interrupts.control(ENABLE | FUNCTION_MASK)
    await interrupts.request(EVERYTHING)
    await interrupts.expect(0)
    await interrupts.pending(EVERYTHING)
    await interrupts.mask(LAST, 1)
    await interrupts.control(ENABLE)
    await interrupts.expect(EVERYTHING & ~(1 << LAST))
    await interrupts.pending(1 << LAST)
    await interrupts.mask(LAST, 0)
    await interrupts.expect(1 << LAST)
    await interrupts.control(0)
    await interrupts.request(1)
    await interrupts.expect(0)
    await interrupts.pending(1)
    await interrupts.control(ENABLE)
    await interrupts.expect(1)
    await bench.finish()


@cocotb.test()
async def the_table_reads_back(dut: object) -> None:
    """Vectors are masked after reset; pending bits are read only."""
    bench = PcieBench(dut)
    await bench.begin()
    rng = bench.random
    for vector in range(VECTORS):
        entry = MSIX_TABLE_OFFSET + 16 * vector
        assert await bench.registers.read_dword(entry + 12) == 1
        words = [rng.getrandbits(32) for _ in range(3)]
        for index, word in enumerate(words):
            await bench.registers.write_dword(entry + 4 * index, word)
        low, high, data = words
        assert await bench.registers.read_qword(entry) == high << 32 | low
        assert await bench.registers.read_dword(entry + 8) == data
        bench.checks += 4
    await bench.registers.write_dword(MSIX_PBA_OFFSET, 1)
    assert await bench.registers.read_qword(MSIX_PBA_OFFSET) == 0
    assert int(dut.o_failed_writes.value) == 1
    await bench.finish()
