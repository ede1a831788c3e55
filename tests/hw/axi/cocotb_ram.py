"""Drives `AxiRam` with cocotbext-axi's manager."""

import os
import random
from collections.abc import Iterator
from itertools import repeat

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, Combine, RisingEdge
from cocotbext.axi import AxiBurstType, AxiBus, AxiMaster, AxiResp

STALL = os.environ["NEARSTEP_STALL"]
SEED = int(os.environ["NEARSTEP_SEED"])
PAUSED = {"free": 0.0, "source": 0.7, "sink": 0.7, "both": 0.5}[STALL]
MEMORY_BYTES, BEAT = 8192, 8
PIECES = 16  # of memory, each written and read by one task


class Bench:
    def __init__(self, dut: object) -> None:
        self.dut = dut
        self.rng = random.Random(SEED)
        bus = AxiBus.from_prefix(dut, "s_axi", bus_separator="__", case_insensitive=False)
        self.master = AxiMaster(bus, dut.clk, dut.rst)
        write, read = self.master.write_if, self.master.read_if
        channels = {
            "source": (write.aw_channel, write.w_channel, read.ar_channel),
            "sink": (write.b_channel, read.r_channel),
        }
        for kind, members in channels.items():
            if STALL in (kind, "both"):
                for channel in members:
                    channel.set_pause_generator(self.pauses(self.rng.random()))

    def pauses(self, seed: float) -> Iterator[bool]:
        rng = random.Random(seed)
        return (rng.random() < PAUSED for _ in repeat(None))

    async def start(self) -> None:
        self.dut.rst.value = 1
        cocotb.start_soon(Clock(self.dut.clk, 10, "ns").start())
        await ClockCycles(self.dut.clk, 3)
        self.dut.rst.value = 0
        await RisingEdge(self.dut.clk)


@cocotb.test()
async def random_bursts(dut: object) -> None:
    """Tasks side by side, each with its own piece of memory: bursts of every length, from every
    byte to every byte, all lanes but those enabled kept."""
    bench = Bench(dut)
    await bench.start()
    size = MEMORY_BYTES // PIECES
    checks = 0

    async def work(piece: int) -> None:
        nonlocal checks
        rng = random.Random(SEED * PIECES + piece)
        base = piece * size
        mirror = bytearray(rng.randbytes(size))
        await bench.master.write(base, bytes(mirror))
        for _ in range(12):
            first = rng.randrange(size)
            data = rng.randbytes(rng.randrange(1, size - first + 1))
            answer = await bench.master.write(base + first, data)
            assert answer.resp == AxiResp.OKAY
            mirror[first : first + len(data)] = data
            first = rng.randrange(size)
            length = rng.randrange(1, size - first + 1)
            found = await bench.master.read(base + first, length)
            assert found.resp == AxiResp.OKAY
            assert found.data == mirror[first : first + length], f"{base + first:#x}"
            checks += 1
        found = await bench.master.read(base, size)
        assert found.data == mirror
        checks += 1

    await Combine(*(cocotb.start_soon(work(piece)) for piece in range(PIECES)))
    assert checks == 13 * PIECES


@cocotb.test()
async def a_beat_a_cycle(dut: object) -> None:
    """Bursts one behind the other: beats without a gap, where nobody stalls."""
    bench = Bench(dut)
    await bench.start()
    moved = {"r": [], "w": []}

    async def follow() -> None:
        cycle = 0
        while True:
            await RisingEdge(dut.clk)
            cycle += 1
            for name, cycles in moved.items():
                valid = getattr(dut, f"s_axi__{name}valid").value
                if valid and getattr(dut, f"s_axi__{name}ready").value:
                    cycles.append(cycle)

    cocotb.start_soon(follow())
    data = bench.rng.randbytes(MEMORY_BYTES)
    await bench.master.write(0, data)
    found = await bench.master.read(0, MEMORY_BYTES)
    assert found.data == data
    for name, cycles in moved.items():
        assert len(cycles) == MEMORY_BYTES // BEAT
        if STALL == "free":
            assert cycles[-1] - cycles[0] == len(cycles) - 1, name


@cocotb.test()
async def what_it_refuses(dut: object) -> None:
    bench = Bench(dut)
    await bench.start()
    master = bench.master
    held = bench.rng.randbytes(64)
    await master.write(0, held)
    refused = {
        AxiResp.DECERR: {"address": MEMORY_BYTES},
        AxiResp.SLVERR: {"address": 0, "burst": AxiBurstType.FIXED},
    }
    checks = 0
    for response, options in refused.items():
        written = await master.write(data=b"\xff" * 64, **options)
        assert written.resp == response
        read = await master.read(length=64, **options)
        assert read.resp == response
        checks += 2
    narrow = await master.write(0, b"\xff" * 64, size=2)
    assert narrow.resp == AxiResp.SLVERR
    assert (await master.read(0, 64)).data == held
    assert checks == 4
