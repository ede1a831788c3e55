"""A memory channel: host and kernel take turns, both written apart from it, on one rank."""

import os
import random
from collections.abc import Iterator

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, RisingEdge
from cocotbext.axi import AxiBus, AxiMaster

from nearstep_hw.axdimm.host_front_end import HOST_READ_LATENCY, HOST_WRITE_LATENCY
from nearstep_sim.bench.axi_memory import STALL_MODES
from nearstep_sim.bench.cocotb_dram import DfiRank, HostBus
from nearstep_sim.models.dram.device import Ddr4Device
from nearstep_sim.models.dram.host import HostConfig, HostController
from nearstep_spec.axdimm.registers import Block, window_base
from nearstep_spec.csr.model import BLOCK_BYTES, LINE_BYTES
from nearstep_spec.dram.command import Command
from nearstep_spec.dram.timing import dram_timing

SEED = int(os.environ.get("NEARSTEP_SEED", "1"))
REGION = 1 << 15
MODE, CONTROL = 1, 2  # lines of the arbiter
KERNEL_RESET = 2


def pauses(chance: float, seed: int) -> Iterator[bool]:
    rng = random.Random(seed)
    while True:
        yield rng.random() < chance


class Bench:
    """What the memory should hold, and those who use it.

    `mode`: the host and the kernel's requests stall in `source`, the kernel's answers in `sink`.
    """

    def __init__(self, dut: object, mode: str, **host: object) -> None:
        self.dut = dut
        self.rng = np.random.default_rng(SEED)
        config = HostConfig(
            read_latency=HOST_READ_LATENCY,
            write_latency=HOST_WRITE_LATENCY,
            stall=0.4 if mode in ("source", "both") else 0.0,
            seed=SEED,
            **host,
        )
        self.mapping = config.address_mapping
        self.window = window_base(self.mapping)
        self.device = Ddr4Device(dram_timing())
        self.host = HostController(config)
        self.base = int(self.rng.integers(1, 1 << 16)) * REGION
        self.expected = self.rng.integers(1, 256, REGION, dtype=np.uint8)  # no zeros
        self.device.write(self.mapping, self.base, self.expected)
        self.checks = 0
        bus = AxiBus.from_prefix(dut, "s_axi", bus_separator="__", case_insensitive=False)
        self.kernel = AxiMaster(bus, dut.clk, dut.rst)
        stalls = STALL_MODES[mode]
        chances = {"ar": stalls.r, "aw": stalls.r, "w": stalls.b, "r": stalls.ar, "b": stalls.aw}
        for index, (name, chance) in enumerate(chances.items()):
            if chance:
                half = self.kernel.read_if if name in ("ar", "r") else self.kernel.write_if
                getattr(half, f"{name}_channel").set_pause_generator(pauses(chance, SEED + index))

    async def begin(self) -> None:
        dut = self.dut
        cocotb.start_soon(Clock(dut.clk, 5, unit="ns").start())
        dut.rst.value, dut.kernel__read_data.value = 1, 0
        rank, bus = DfiRank(dut, "dfi", self.device), HostBus(dut, "host", self.host)
        await ClockCycles(dut.clk, 4)
        dut.rst.value = 0
        cocotb.start_soon(rank.run())
        cocotb.start_soon(bus.run())

    async def until(self, holds: object, what: str, most: int = 20_000) -> None:
        for _ in range(most):
            if holds():
                return
            await RisingEdge(self.dut.clk)
        raise AssertionError(f"not {what} within {most} cycles")

    async def line(self, line: int, word: int) -> None:
        """Store of an arbiter line."""
        data = np.zeros(LINE_BYTES // 4, np.uint32)
        data[0] = word
        address = self.window + Block.ARBITER * BLOCK_BYTES + line * LINE_BYTES
        self.host.store(address, data.tobytes())
        self.host.fence()
        await self.until(lambda: self.host.idle, "idle")

    async def reach(self, acceleration: bool) -> None:
        await self.line(MODE, int(acceleration))
        flag = self.dut.o_acceleration if acceleration else self.dut.o_normal
        await self.until(lambda: bool(flag.value), "in the mode that was requested")

    async def host_loads(self, n: int, *, refused: bool) -> None:
        where = self.rng.integers(0, REGION // LINE_BYTES, n)
        self.host.completed()
        self.host.submit(np.zeros(n, bool), self.base + where * LINE_BYTES, tags=where)
        await self.until(lambda: self.host.idle, "idle")
        loads = self.host.completed()
        assert len(loads.tags) == n
        wanted = self.expected.reshape(-1, LINE_BYTES)[loads.tags]
        assert np.array_equal(loads.data, 0 * wanted if refused else wanted)
        self.checks += n

    async def host_stores(self, n: int, *, refused: bool) -> None:
        where = self.rng.permutation(REGION // LINE_BYTES)[:n]
        data = self.rng.integers(1, 256, (n, LINE_BYTES), dtype=np.uint8)
        self.host.submit(np.ones(n, bool), self.base + where * LINE_BYTES, data=data)
        self.host.fence()
        await self.until(lambda: self.host.idle, "idle")
        if not refused:
            self.expected.reshape(-1, LINE_BYTES)[where] = data

    async def kernel_traffic(self, n: int) -> None:
        for _ in range(n):
            size = int(self.rng.integers(1, 2000))
            offset = int(self.rng.integers(0, (REGION - size) // LINE_BYTES)) * LINE_BYTES
            if self.rng.random() < 0.5:
                data = self.rng.integers(1, 256, size, dtype=np.uint8)
                await self.kernel.write(self.base + offset, data.tobytes())
                self.expected[offset : offset + size] = data
            else:
                answer = await self.kernel.read(self.base + offset, size)
                found = np.frombuffer(answer.data, np.uint8)
                assert np.array_equal(found, self.expected[offset : offset + size])
                self.checks += 1

    def compare(self) -> None:
        found = self.device.read(self.mapping, self.base, REGION)
        assert np.array_equal(found, self.expected)
        self.checks += 1


@cocotb.test()
@cocotb.parametrize(mode=list(STALL_MODES))
async def host_and_kernel_see_what_the_other_wrote(dut: object, mode: str) -> None:
    bench = Bench(dut, mode, postpone=8 if mode == "both" else 1)
    await bench.begin()
    for _ in range(3):
        await bench.host_stores(30, refused=False)
        await bench.host_loads(60, refused=False)
        await bench.reach(True)
        kernel = cocotb.start_soon(bench.kernel_traffic(6))
        await bench.host_stores(5, refused=True)
        await bench.host_loads(20, refused=True)
        await kernel
        await bench.reach(False)
        await bench.host_loads(60, refused=False)
        bench.compare()
    assert bench.checks > 3 * 141
    print(f"seed {SEED}: {bench.checks} checks, {bench.device.counts}")


@cocotb.test()
async def a_kernel_waits_in_normal_mode(dut: object) -> None:
    bench = Bench(dut, "free")
    await bench.begin()
    kernel = cocotb.start_soon(bench.kernel_traffic(4))
    await bench.until(lambda: bool(dut.o_normal.value), "normal")
    await bench.host_loads(40, refused=False)
    assert not kernel.done()
    assert bench.device.counts[Command.RD] == 40
    await bench.reach(True)
    await kernel
    await bench.reach(False)
    bench.compare()


@cocotb.test()
async def a_reset_of_the_kernel_gives_the_channel_back(dut: object) -> None:
    """The host's own data are there, whatever the kernel was doing."""
    bench = Bench(dut, "free")
    await bench.begin()
    await bench.host_stores(30, refused=False)
    await bench.reach(True)
    far = bench.base + (1 << 31)
    traffic = [cocotb.start_soon(bench.kernel.read(far + 4096 * n, 4096)) for n in range(8)]
    await ClockCycles(dut.clk, 100)
    bench.kernel.read_if.r_channel.pause = True  # it hangs
    await ClockCycles(dut.clk, 500)
    assert not all(each.done() for each in traffic)
    await bench.line(MODE, 0)
    await bench.line(CONTROL, KERNEL_RESET)
    await bench.until(lambda: bool(dut.o_normal.value), "normal", 2000)
    await bench.host_loads(60, refused=False)
    bench.compare()
    for each in traffic:
        each.cancel()
    assert bench.checks == 61
