"""The DDR4 controller between a bus master written by others and the rank model."""

import os
import random
from collections.abc import Iterator

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, RisingEdge
from cocotbext.axi import AxiBus, AxiMaster

from nearstep_sim.bench.axi_memory import STALL_MODES
from nearstep_sim.bench.cocotb_dram import DfiRank
from nearstep_sim.models.dram.device import Ddr4Device, DramViolationError
from nearstep_spec.dram.address import AddressMapping
from nearstep_spec.dram.command import Command
from nearstep_spec.dram.timing import dram_timing

SEED = int(os.environ.get("NEARSTEP_SEED", "1"))
REGION = 1 << 16
BEAT = 64


def pauses(chance: float, seed: int) -> Iterator[bool]:
    rng = random.Random(seed)
    while True:
        yield rng.random() < chance


class Bench:
    """A region of memory with guards around it, and what it should hold.

    `mode` is as seen from the controller: in `source` AW, W and AR pause, in `sink` R and B.
    """

    def __init__(self, dut: object, mode: str) -> None:
        self.dut = dut
        self.rng = np.random.default_rng(SEED)
        self.mapping = AddressMapping()
        self.base = int(self.rng.integers(1, 1 << 16)) * REGION
        self.device = Ddr4Device(dram_timing())
        self.expected = self.rng.integers(0, 256, 3 * REGION, dtype=np.uint8)
        self.device.write(self.mapping, self.base - REGION, self.expected)
        self.checks = 0
        bus = AxiBus.from_prefix(dut, "s_axi", bus_separator="__", case_insensitive=False)
        self.master = AxiMaster(bus, dut.clk, dut.rst)
        stalls = STALL_MODES[mode]  # of a memory: its source is R and B
        chances = {"ar": stalls.r, "aw": stalls.r, "w": stalls.b, "r": stalls.ar, "b": stalls.aw}
        for index, (name, chance) in enumerate(chances.items()):
            if chance:
                half = self.master.read_if if name in ("ar", "r") else self.master.write_if
                channel = getattr(half, f"{name}_channel")
                channel.set_pause_generator(pauses(chance, SEED + index))

    async def begin(self, *, debt: int = 0) -> None:
        dut = self.dut
        cocotb.start_soon(Clock(dut.clk, 5, unit="ns").start())
        dut.rst.value, dut.i_enable.value = 1, 0
        dut.i_debt.value, dut.i_clear_slots.value, dut.i_calibrate.value = debt, 0, 0
        self.rank = DfiRank(dut, "dfi", self.device)
        await ClockCycles(dut.clk, 4)
        dut.rst.value, dut.i_enable.value = 0, 1
        self.following = cocotb.start_soon(self.rank.run())

    def span(self) -> tuple[int, int]:
        """Offset in the region, a beat's, and bytes, any number."""
        size = int(self.rng.integers(1, 6000))
        offset = int(self.rng.integers(0, (REGION - size) // BEAT)) * BEAT
        return offset, size

    async def write(self) -> None:
        offset, size = self.span()
        data = self.rng.integers(0, 256, size, dtype=np.uint8)
        await self.master.write(self.base + offset, data.tobytes())
        self.expected[REGION + offset : REGION + offset + size] = data

    async def read(self) -> None:
        offset, size = self.span()
        answer = await self.master.read(self.base + offset, size)
        found = np.frombuffer(answer.data, np.uint8)
        wanted = self.expected[REGION + offset : REGION + offset + size]
        assert np.array_equal(found, wanted), f"read of {size} bytes at {offset:#x}"
        self.checks += size

    def compare(self) -> None:
        found = self.device.read(self.mapping, self.base - REGION, 3 * REGION)
        wrong = np.flatnonzero(found != self.expected)
        assert not wrong.size, f"{wrong.size} bytes of memory differ, first {int(wrong[0]):#x}"
        self.checks += found.size

    async def hand_back(self) -> int:
        """Cycles until the channel is handed back."""
        self.dut.i_enable.value = 0
        for cycle in range(2000):
            await RisingEdge(self.dut.clk)
            if self.dut.o_idle.value:
                return cycle
        raise AssertionError("the channel is not handed back within 2000 cycles")


@cocotb.test()
@cocotb.parametrize(mode=list(STALL_MODES))
async def data_are_kept(dut: object, mode: str) -> None:
    bench = Bench(dut, mode)
    await bench.begin()
    for _ in range(25):
        await (bench.write() if bench.rng.random() < 0.5 else bench.read())
    for _ in range(3):  # side by side; the master keeps the order within each direction
        await bench.write()
        readers = [cocotb.start_soon(bench.read()) for _ in range(4)]
        for reader in readers:
            await reader
    bench.compare()
    assert bench.checks > 3 * REGION + 10_000
    assert bench.device.counts[Command.REF] > 0
    dut._log.info("seed %d, %d bytes compared, %s", SEED, bench.checks, bench.device.counts)


@cocotb.test()
async def a_channel_that_is_handed_back_is_closed_and_owes_nothing(dut: object) -> None:
    bench = Bench(dut, "both")
    await bench.begin(debt=8)
    for _ in range(4):
        traffic = [cocotb.start_soon(bench.read()) for _ in range(4)]
        await ClockCycles(dut.clk, int(bench.rng.integers(5, 300)))
        took = await bench.hand_back()
        geometry = bench.device.geometry
        for group in range(geometry.bank_groups):
            for bank in range(geometry.banks_per_group):
                assert bench.device.open_row(group, bank) is None
                bench.checks += 1
        assert int(dut.o_debt.value) == 0
        given = bench.rank.commands
        await ClockCycles(dut.clk, 50)
        assert bench.rank.commands == given, f"a command after o_idle, {took} cycles"
        dut.i_debt.value, dut.i_enable.value = 1, 1
        for each in traffic:
            await each
    assert bench.device.counts[Command.REF] >= 8
    bench.compare()
    assert bench.checks > 3 * REGION


@cocotb.test()
async def bursts_outside_the_channel_are_answered_and_do_nothing(dut: object) -> None:
    bench = Bench(dut, "free")
    await bench.begin()
    await bench.read()
    before = bench.device.counts
    answer = await bench.master.read(1 << 33, 256)
    assert int(answer.resp) == 3
    done = await bench.master.write(1 << 33, bytes(256))
    assert int(done.resp) == 3
    for command in (Command.RD, Command.WR):
        assert bench.device.counts[command] == before[command]
    bench.compare()


@cocotb.test(expect_error=DramViolationError)
async def a_rank_of_slower_chips_notices(dut: object) -> None:
    """The bench itself: refreshes follow each other too early for a rank of 16Gb chips."""
    bench = Bench(dut, "free")
    bench.device = Ddr4Device(dram_timing(density="16Gb"))
    await bench.begin(debt=8)
    await bench.hand_back()
    await bench.following
