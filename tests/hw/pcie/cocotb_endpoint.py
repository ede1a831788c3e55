"""Memory of the card through BAR 2: any length and alignment, any byte enables, a peer."""

import cocotb
from pcie_bench import CONFIG, MODES, PcieBench, enables

PAGE = 4096


@cocotb.test()
@cocotb.parametrize(mode=list(MODES))
async def any_length_and_alignment(dut: object, mode: str) -> None:
    """Write in a row, then reads at once; also across pages, which the host cuts in two."""
    bench = PcieBench(dut, mode=mode)
    await bench.begin()
    rng = bench.random
    for _ in range(6):
        for _ in range(rng.randrange(1, 12)):
            length = rng.choice((rng.randrange(1, 20), rng.randrange(1, 1200)))
            offset = rng.randrange(0, CONFIG.memory_bytes - length)
            await bench.write(offset, rng.randbytes(length))
        reads = []
        for _ in range(8):
            length = rng.choice((rng.randrange(1, 20), rng.randrange(1, 3 * PAGE)))
            offset = rng.randrange(0, CONFIG.memory_bytes - length)
            reads.append(cocotb.start_soon(bench.read(offset, length)))
        for read in reads:
            await read
    for page in (PAGE, 3 * PAGE):
        for length in (2, 64, 130, 5000):
            data = rng.randbytes(length)
            await bench.write(page - 1, data)
            await bench.read(page - 1, length)
    await bench.read(0, CONFIG.memory_bytes)
    await bench.finish()
    assert int(dut.o_dropped.value) == 0
    assert int(dut.o_failed_reads.value) == 0


@cocotb.test()
@cocotb.parametrize(mode=["free", "both"])
async def any_byte_enables(dut: object, mode: str) -> None:
    """All of one dword, all pairs of two in 8 aligned bytes, of others the edges; also no byte."""
    bench = PcieBench(dut, mode=mode)
    await bench.begin()
    rng = bench.random
    cases = [(4, 1, first, 0) for first in range(16)]
    cases += [(8, 2, first, last) for first in range(1, 16) for last in range(1, 16)]
    cases += [
        (4, dwords, first, last)
        for dwords in (2, 3, 16, 17, 33, 64)
        for first in (0xF, 0xE, 0xC, 8)
        for last in (0xF, 7, 3, 1)
    ]
    for aligned, dwords, first, last in cases:
        page = rng.randrange(0, CONFIG.memory_bytes, PAGE)
        offset = page + rng.randrange(0, PAGE - 4 * dwords + 1, aligned)
        data = rng.randbytes(4 * dwords)
        write = bench.memory_write(offset, data, first=first, last=last)
        bench.post(write)
        for index, enabled in enumerate(enables(write)):
            if enabled:
                bench.mirror[offset + index] = data[index]
        read = bench.memory_read(offset, dwords, first=first, last=last)
        got = await bench.accepted(read)
        expected = bench.mirror[offset : offset + 4 * dwords].tobytes()
        for index, enabled in enumerate(enables(read)):
            assert got[index] == (expected[index] if enabled else 0), (dwords, first, last, index)
            bench.checks += 1
    await bench.finish()


@cocotb.test()
@cocotb.parametrize(max_payload=[128, 256, 512, 1024])
async def completions_are_as_large_as_the_host_allows(dut: object, max_payload: int) -> None:
    """A read of a page at every alignment within a payload takes as many as it must."""
    bench = PcieBench(dut, max_payload=max_payload)
    await bench.begin()
    assert bench.monitor.max_payload == max_payload
    for offset in (0, 4, 60, 64, 124, 128, max_payload - 4):
        before = bench.monitor.checks
        await bench.accepted(bench.memory_read(PAGE + offset, (PAGE - offset) // 4))
        pieces = -(-(PAGE - offset) // max_payload)
        assert bench.monitor.checks - before == pieces
        await bench.write(2 * PAGE + offset, bench.random.randbytes(max_payload + 8))
        await bench.read(2 * PAGE + offset - 4, max_payload + 16)
        bench.checks += 1
    await bench.finish()


@cocotb.test()
@cocotb.parametrize(mode=list(MODES))
async def a_peer_reads_and_writes(dut: object, mode: str) -> None:
    """Another device below the switch, while the host is busy elsewhere in the memory."""
    bench = PcieBench(dut, mode=mode)
    await bench.begin()
    rng, half = bench.random, CONFIG.memory_bytes // 2

    async def host() -> None:
        for _ in range(12):
            length = rng.randrange(1, 700)
            offset = half + rng.randrange(0, half - length)
            await bench.write(offset, rng.randbytes(length))
            await bench.read(offset, length)

    busy = cocotb.start_soon(host())
    for _ in range(12):
        length = rng.randrange(1, 1500)
        offset = rng.randrange(0, half - length)
        data = rng.randbytes(length)
        await bench.peer.mem_write(bench.base + offset, data)
        bench.mirror[offset : offset + length] = list(data)
        start = max(offset - 3, 0)
        got = await bench.peer.mem_read(bench.base + start, length + 3)
        assert bytes(got) == bench.mirror[start : start + length + 3].tobytes()
        bench.checks += length + 3
    await busy
    await bench.finish()
