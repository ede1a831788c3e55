"""Reads and register writes wait for writes in front of them; writes wait for no read."""

import cocotb
from cocotb.triggers import ClockCycles, RisingEdge
from pcie_bench import MODES, PcieBench

LONG = 400  # cycles, far more than any request takes


@cocotb.test()
async def nothing_passes_a_write_that_is_not_answered(dut: object) -> None:
    """With B held back, data are in memory and yet nothing behind the write begins."""
    bench = PcieBench(dut)
    await bench.begin()
    rng = bench.random
    starts = count_starts(dut)
    low = bench.map["low"].offset
    for _ in range(8):
        offset = rng.randrange(0, 4096 - 256, 4)
        data = rng.randbytes(128)
        bench.ram.write_if.b_channel.pause = True
        bench.post(bench.memory_write(offset, data))
        bench.mirror[offset : offset + 128] = list(data)
        before = dict(bench.checker.transfers)
        starts_before = starts["seen"]
        packets = len(bench.monitor.packets)
        reads = [cocotb.start_soon(bench.accepted(bench.memory_read(offset, 32)))]
        reads.append(cocotb.start_soon(bench.accepted(bench.register_read(low))))
        await ClockCycles(dut.clk, 20)
        bench.post(bench.register_write(bench.map["start"].offset, b"\1\0\0\0"))
        await ClockCycles(dut.clk, LONG)
        assert bench.memory[offset : offset + 128].tobytes() == data
        assert bench.checker.transfers["w"] > before["w"]
        assert bench.checker.transfers["ar"] == before["ar"]
        assert len(bench.monitor.packets) == packets
        assert starts["seen"] == starts_before
        bench.ram.write_if.b_channel.pause = False
        assert await reads[0] == data
        assert await reads[1] == b"\7\0\0\0"
        await bench.settle()
        assert starts["seen"] == starts_before + 1
        bench.checks += 8
    await bench.finish()


@cocotb.test()
async def writes_pass_reads_that_cannot_be_answered(dut: object) -> None:
    """With CC held back and more reads than there is space for, every write is still done."""
    bench = PcieBench(dut)
    await bench.begin()
    rng = bench.random
    bench.card.cc_sink.pause = True
    # Two pages fill the landing space and the jobs; what is left is more than may wait.
    requests = [bench.memory_read(4096, 1024) for _ in range(4)]
    requests += [bench.memory_read(4 * rng.randrange(1000), 1) for _ in range(27)]
    reads = [cocotb.start_soon(bench.exchange(request)) for request in requests]
    await ClockCycles(dut.clk, LONG)
    before = dict(bench.checker.transfers)
    writes = 100
    for index in range(writes):
        offset = 8192 + 256 * (index % 32) + rng.randrange(0, 128, 4)
        data = rng.randbytes(4 * rng.randrange(1, 32))
        bench.post(bench.memory_write(offset, data))
        bench.mirror[offset : offset + len(data)] = list(data)
    bench.post(bench.register_write(bench.map["high"].offset, b"\x55\0\0\0"))
    await ClockCycles(dut.clk, 20 * LONG)
    assert bench.checker.transfers["b"] - before["b"] == writes
    assert not (bench.memory != bench.mirror).any()
    bench.checks += writes
    assert not any(read.done() for read in reads)
    bench.card.cc_sink.pause = False
    for read in reads:
        for answer in await read:
            assert answer.status == 0
    assert await bench.register("high") == 0x55
    await bench.finish()


@cocotb.test()
@cocotb.parametrize(mode=list(MODES))
async def a_start_finds_the_data_of_a_peer(dut: object, mode: str) -> None:
    """At each START everything that was written before it is in memory."""
    bench = PcieBench(dut, mode=mode)
    await bench.begin()
    rng = bench.random
    written: list[bytes] = []
    found = {"starts": 0}

    async def watch() -> None:
        while True:
            await RisingEdge(dut.clk)
            if dut.o_start.value:
                image = written[found["starts"]]
                assert bench.memory[:4096].tobytes() == image, found
                found["starts"] += 1
                bench.checks += 4096

    cocotb.start_soon(watch())
    start = bench.register_base + bench.map["start"].offset
    for index in range(30):
        for _ in range(rng.randrange(1, 4)):
            length = rng.randrange(1, 600)
            offset = rng.randrange(0, 4096 - length)
            data = rng.randbytes(length)
            bench.mirror[offset : offset + length] = list(data)
            await bench.peer.mem_write(bench.base + offset, data)
        written.append(bench.mirror[:4096].tobytes())
        await bench.peer.mem_write(start, b"\1\0\0\0")
        for _ in range(2000):
            if found["starts"] > index:
                break
            await RisingEdge(dut.clk)
        assert found["starts"] == index + 1
    await bench.finish()


def count_starts(dut: object) -> dict[str, int]:
    """Count pulses of `o_start` from now on."""
    seen = {"seen": 0}

    async def watch() -> None:
        while True:
            await RisingEdge(dut.clk)
            seen["seen"] += int(dut.o_start.value)

    cocotb.start_soon(watch())
    return seen
