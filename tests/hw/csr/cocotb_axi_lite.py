"""Drives a register block through AXI4-Lite with cocotbext-axi's manager."""

import os
import random
from collections.abc import Iterator
from itertools import repeat

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, RisingEdge
from cocotbext.axi import AxiLiteBus, AxiLiteMaster, AxiResp
from sample import sample_map

from nearstep_sim.golden.registers import RegisterFile
from nearstep_spec.csr.model import Access, RegisterMap, port_name

STALL = os.environ["NEARSTEP_STALL"]
SEED = int(os.environ["NEARSTEP_SEED"])
PAUSED = {"free": 0.0, "source": 0.7, "sink": 0.7, "both": 0.5}[STALL]
WORD = 4


class Bench:
    """The block, its manager with the stalls of this run, and its golden model."""

    def __init__(self, dut: object) -> None:
        self.dut = dut
        self.rng = random.Random(SEED)
        self.map: RegisterMap = sample_map()
        self.golden = RegisterFile(self.map)
        bus = AxiLiteBus.from_prefix(dut, "s_axil", bus_separator="__", case_insensitive=False)
        self.master = AxiLiteMaster(bus, dut.clk, dut.rst)
        write, read = self.master.write_if, self.master.read_if
        channels = {
            "source": (write.aw_channel, write.w_channel, read.ar_channel),
            "sink": (write.b_channel, read.r_channel),
        }
        for kind, members in channels.items():
            if STALL in (kind, "both"):
                for channel in members:
                    channel.set_pause_generator(self.pauses(self.rng.random()))
        self.ports = {
            f"{register.name}.{field.name}": getattr(dut, name)
            for register, field in self.map.fields()
            if (name := port_name(register, field)) is not None
        }

    def pauses(self, seed: float) -> Iterator[bool]:
        rng = random.Random(seed)
        return (rng.random() < PAUSED for _ in repeat(None))

    def drive(self, path: str, value: int) -> None:
        self.ports[path].value = value
        self.golden[path] = value

    async def start(self) -> None:
        for path, port in self.ports.items():
            if self.map.lookup(path)[1].access in (Access.STATUS, Access.COUNTER):
                port.value = 0
        self.dut.rst.value = 1
        cocotb.start_soon(Clock(self.dut.clk, 10, "ns").start())
        await ClockCycles(self.dut.clk, 3)
        self.dut.rst.value = 0
        await RisingEdge(self.dut.clk)

    async def read(self, address: int) -> None:
        """One read, compared with the golden model."""
        answer = await self.master.read(address, WORD)
        expected = self.golden.read(address)
        assert (answer.resp != AxiResp.OKAY) == expected.error, f"{address:#x}: {answer}"
        assert int.from_bytes(answer.data, "little") == expected.value, f"{address:#x}: {answer}"

    async def write(self, address: int, value: int, nbytes: int = WORD) -> None:
        """One write of the low `nbytes` bytes, compared with the golden model."""
        data = value.to_bytes(WORD, "little")[:nbytes]
        answer = await self.master.write(address, data)
        expected = self.golden.write(address, value, (1 << nbytes) - 1)
        assert answer.resp == (AxiResp.SLVERR if expected.error else AxiResp.OKAY), f"{address:#x}"


@cocotb.test()
async def random_accesses(dut: object) -> None:
    bench = Bench(dut)
    await bench.start()
    rng, golden = bench.rng, bench.golden
    addresses = [r.offset + WORD * i for r in bench.map for i in range(r.words)]
    checks = {"read": 0, "write": 0, "output": 0}
    bench.drive("cycles.value", 0xFFFF_FFFF_FFFF_FFF0)
    for _ in range(200):
        bench.drive("status.level", rng.randrange(128))
        bench.drive("cycles.value", (golden["cycles.value"] + 5) % (1 << 64))
        bench.drive("beats.value", rng.getrandbits(40))
        bench.drive("status.busy", rng.randrange(2))  # last: its fall captures the counters
        await ClockCycles(dut.clk, 3)
        address = rng.choice(addresses) if rng.random() < 0.9 else rng.randrange(0, 4096, WORD)
        if rng.random() < 0.5:
            await bench.read(address)
            checks["read"] += 1
        else:
            await bench.write(address, rng.getrandbits(32), rng.choice((4, 4, 4, 1, 2, 3)))
            checks["write"] += 1
        await ClockCycles(dut.clk, 2)
        for path, port in bench.ports.items():
            if bench.map.lookup(path)[1].access is Access.CONFIG:
                assert int(port.value) == golden[path], path
                checks["output"] += 1
    cocotb.log.info("checks: %s", checks)
    assert min(checks.values()) > 50


@cocotb.test()
async def reads_and_writes_at_once(dut: object) -> None:
    """Many accesses queued in both directions: each is answered once, in order, with its own."""
    bench = Bench(dut)
    await bench.start()
    free, constant = bench.map["free"].offset, bench.map["id"].offset
    values = [bench.rng.getrandbits(32) for _ in range(60)]
    reads = [bench.master.init_read((constant, 0xFF0)[i % 2], WORD) for i in range(60)]
    writes = [
        bench.master.init_write((free, constant)[i % 2], value.to_bytes(WORD, "little"))
        for i, value in enumerate(values)
    ]
    for index, (read, write) in enumerate(zip(reads, writes, strict=True)):
        await read.wait()
        await write.wait()
        expected = AxiResp.SLVERR if index % 2 else AxiResp.OKAY
        assert write.data.resp == expected, index
        assert read.data.resp == expected, index
        value = int.from_bytes(read.data.data, "little")
        assert value == (0 if index % 2 else bench.golden["id.value"]), index
    bench.golden["free.value"] = values[-2]
    await bench.read(free)
    await ClockCycles(dut.clk, 20)
    assert bench.master.idle()


@cocotb.test()
async def every_start_is_one_pulse(dut: object) -> None:
    bench = Bench(dut)
    await bench.start()
    seen = {"pulses": 0}

    async def count() -> None:
        while True:
            await RisingEdge(dut.clk)
            seen["pulses"] += int(dut.o_start_go.value)

    cocotb.start_soon(count())
    accepted = 0
    for _ in range(40):
        bench.drive("status.busy", bench.rng.randrange(2))
        await ClockCycles(dut.clk, 2)
        accepted += not bench.golden["status.busy"]
        await bench.write(bench.map["start"].offset, 1)
    await ClockCycles(dut.clk, 5)
    assert 5 < accepted < 35
    assert seen["pulses"] == accepted
    await bench.read(bench.map["status"].offset)
