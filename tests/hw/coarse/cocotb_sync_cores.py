"""Two sync cores, joined by this bench, with memories of cocotbext-axi; golden is the reference."""

import json
import os
import random
from collections import deque

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, ReadOnly, RisingEdge
from cocotbext.axi import AxiBus, AxiRam, AxiReadBus, AxiWriteBus

from nearstep_hw.coarse.wire import JobLayout
from nearstep_sim.bench.axi_checker import AxiChecker
from nearstep_sim.bench.cocotb_axi import AxiPort
from nearstep_sim.golden.coarse import ring_all_reduce
from nearstep_spec.coarse.config import BEAT_BYTES, CoarseConfig
from nearstep_spec.coarse.registers import Operation, Wire

OPTIONS = json.loads(os.environ["NEARSTEP_CONFIG"])
SEED = int(os.environ.get("NEARSTEP_SEED", "1"))
CONFIG = CoarseConfig(**{k: tuple(v) if isinstance(v, list) else v for k, v in OPTIONS.items()})
CORES = 2
STALLS = {"free": (0.0, 0.0), "source": (0.5, 0.0), "sink": (0.0, 0.5), "both": (0.4, 0.4)}
"""Chances that links and memories give nothing, and take nothing, in a cycle."""
CHANNELS = ("ar", "r", "aw", "w", "b")
GUARD = 0xA5
MEMORY = 1 << 20  # of each core, of which the rest is not there
SOURCE, DESTINATION = 4096 - 5 * BEAT_BYTES, MEMORY // 2 + 3 * BEAT_BYTES
LIMIT = 60_000  # cycles of a job
LONG = 16_000  # elements: a job of more cycles than it is given before it is halted


class Core:
    """Pins of one core, its memory, and what it has been heard to say."""

    def __init__(self, dut: object, number: int, pauses: tuple[float, float]) -> None:
        self.dut, self.number = dut, number
        self.content = bytearray([GUARD]) * MEMORY
        self.memory = np.frombuffer(self.content, np.uint8)
        self.random = random.Random(f"{SEED} {pauses} {number}")
        names = {"bus_separator": "__", "case_insensitive": False}
        write = AxiWriteBus.from_prefix(dut, f"write{number}", **names)
        read = AxiReadBus.from_prefix(dut, f"read{number}", **names)
        self.ram = AxiRam(AxiBus(write, read), dut.clk, dut.rst, mem=self.content)
        gives, takes = pauses
        for channel in (self.ram.read_if.r_channel, self.ram.write_if.b_channel):
            channel.set_pause_generator(self.pauses(gives))
        for channel in (
            *(self.ram.read_if.ar_channel, self.ram.write_if.aw_channel),
            self.ram.write_if.w_channel,
        ):
            channel.set_pause_generator(self.pauses(takes))
        self.checker = AxiChecker(beat_bytes=BEAT_BYTES, read_ids=2, write_ids=2)
        self.port = AxiPort(
            dut, f"read{number}", checker=self.checker, write_prefix=f"write{number}"
        )
        self.link: deque[int] = deque()  # from here to the next
        self.offered = False  # the first phit of the other's link
        self.held: int | None = None  # a phit that was not taken
        self.done = 0
        self.phits = 0

    def pin(self, name: str) -> object:
        return getattr(self.dut, name.replace("*", str(self.number)))

    def pauses(self, chance: float):
        while True:
            yield self.random.random() < chance


class CoresBench:
    """Cores, links between them that stall, and the jobs that they are given."""

    def __init__(self, dut: object, mode: str) -> None:
        self.dut = dut
        self.mode = mode
        self.cores = [Core(dut, number, STALLS[mode]) for number in range(CORES)]
        self.random = np.random.default_rng(SEED)
        self.stalls = random.Random(f"{SEED} links {mode}")
        self.checks = 0
        self.cut = False

    async def begin(self) -> None:
        self.dut.rst.value = 1
        cocotb.start_soon(Clock(self.dut.clk, 5, unit="ns").start())
        for core in self.cores:
            for name in ("job*__valid", "receive*__valid", "send*__ready", "i_halt*", "i_clear*"):
                core.pin(name).value = 0
            core.pin("i_members*").value = CORES
            core.pin("i_position*").value = core.number
            core.pin("i_window_base*").value = 0
            core.pin("i_window_limit*").value = MEMORY
            cocotb.start_soon(core.port.run())
        await ClockCycles(self.dut.clk, 4)
        self.dut.rst.value = 0
        await ClockCycles(self.dut.clk, 2)
        cocotb.start_soon(self.carry())

    async def carry(self) -> None:
        """What a core sends is received by the other one; nobody waits longer than by chance.

        Links that are cut carry nothing, and lose what is on them.
        """
        gives, takes = STALLS[self.mode]
        ready = [False] * CORES
        while True:
            for core in self.cores:
                there = self.cores[core.number - 1].link
                if self.cut:
                    core.link.clear()
                    core.offered, core.held = False, None
                elif not core.offered:
                    core.offered = bool(there) and self.stalls.random() >= gives
                ready[core.number] = not self.cut and self.stalls.random() >= takes
                core.pin("receive*__valid").value = int(core.offered)
                if core.offered:
                    core.pin("receive*__payload").value = there[0]
                core.pin("send*__ready").value = int(ready[core.number])
            await ReadOnly()
            taken = [bool(c.pin("receive*__ready").value) for c in self.cores]
            sent = [
                int(c.pin("send*__payload").value) if c.pin("send*__valid").value else None
                for c in self.cores
            ]
            for core in self.cores:
                core.done += int(core.pin("o_done*").value)
                if core.held is not None:
                    assert sent[core.number] == core.held, "a phit changed before it went"
                    self.checks += 1
            await RisingEdge(self.dut.clk)
            for core in self.cores:
                if core.offered and taken[core.number]:
                    self.cores[core.number - 1].link.popleft()
                    core.offered = False
            for core in self.cores:
                phit = sent[core.number]
                moves = phit is not None and ready[core.number]
                core.held = None if moves else phit
                if moves:
                    core.link.append(phit)
                    core.phits += 1

    async def give(self, core: Core, size: int, op: str, wire: str) -> None:
        job = {
            "source": SOURCE,
            "destination": DESTINATION,
            "elements": size,
            "scale": int(np.float32(1 / CORES).view(np.uint32)),
            "tag": size & 0x7FFF,
            "operation": Operation[op.upper()],
            "wire": Wire[wire.upper()],
            "beyond": 0,
        }
        layout = JobLayout(address_width=CONFIG.address_width)
        core.pin("job*__payload").value = layout.const(job).as_bits()
        core.pin("job*__valid").value = 1
        await RisingEdge(self.dut.clk)
        while not core.pin("job*__ready").value:
            await RisingEdge(self.dut.clk)
        core.pin("job*__valid").value = 0

    def load(self, size: int) -> list[np.ndarray]:
        tensors = []
        for core in self.cores:
            core.memory[:] = GUARD
            tensor = self.random.standard_normal(size).astype(np.float32)
            tensor[self.random.random(size) < 0.05] = np.float32(np.nan)
            core.memory[SOURCE:][: 4 * size] = tensor.view(np.uint8)
            tensors.append(tensor)
        return tensors

    async def reduce(self, size: int, op: str, wire: str) -> None:
        tensors = self.load(size)
        want = ring_all_reduce(tensors, operation=op, wire=wire, config=CONFIG).view(np.uint32)
        before = [core.done for core in self.cores]
        for core in self.cores:
            cocotb.start_soon(self.give(core, size, op, wire))
        for _ in range(LIMIT):
            await RisingEdge(self.dut.clk)
            if all(c.done == b + 1 for c, b in zip(self.cores, before, strict=True)):
                break
        else:
            raise AssertionError(f"{size} elements, {op}, {wire}: not done in {LIMIT} cycles")
        lines = -(-size // 16) * BEAT_BYTES
        for core, tensor in zip(self.cores, tensors, strict=True):
            got = core.memory[DESTINATION:][: 4 * size].view(np.uint32)
            np.testing.assert_array_equal(got, want, err_msg=f"core {core.number}")
            kept = core.memory[SOURCE:][: 4 * size].view(np.uint32)
            np.testing.assert_array_equal(kept, tensor.view(np.uint32))
            written = slice(DESTINATION, DESTINATION + lines)
            rest = np.delete(core.memory, np.r_[SOURCE : SOURCE + 4 * size, written])
            assert (rest == GUARD).all(), "written elsewhere"
            tail = core.memory[DESTINATION + 4 * size : DESTINATION + lines]
            assert (tail == GUARD).all(), "written behind the last element"
            self.checks += 2 * size + rest.size

    async def halt(self) -> None:
        """Both forget a job in the midst of it."""
        for core in self.cores:
            core.pin("i_halt*").value = 1
        for _ in range(LIMIT):
            await RisingEdge(self.dut.clk)
            if all(core.pin("o_idle*").value for core in self.cores):
                break
        else:
            raise AssertionError("a core does not become idle")
        self.cut = True
        await ClockCycles(self.dut.clk, 2)
        for core in self.cores:
            core.pin("i_clear*").value = 1
        await RisingEdge(self.dut.clk)
        for core in self.cores:
            core.pin("i_clear*").value = 0
            core.pin("i_halt*").value = 0
        await RisingEdge(self.dut.clk)
        self.cut = False
        self.checks += 1

    def end(self, name: str) -> None:
        for core in self.cores:
            core.checker.finish()
            assert all(core.checker.transfers[channel] for channel in CHANNELS)
            assert not core.pin("o_error_valid*").value
            assert core.phits
            self.checks += sum(core.checker.transfers.values())
        cycles = self.cores[0].checker.cycles
        cocotb.log.info("%s_%s: %d checks, %d cycles", name, self.mode, self.checks, cycles)


@cocotb.test()
@cocotb.parametrize(mode=list(STALLS))
async def sums_are_those_of_the_golden_ring(dut: object, mode: str) -> None:
    """Each operation and wire; nothing, an element, a chunk and more than that."""
    bench = CoresBench(dut, mode)
    await bench.begin()
    chunk = CORES * CONFIG.entry_elements("fp32")
    for size, op, wire in (
        (1, "average", "bf16"),
        (0, "sum", "fp32"),
        (chunk + 17, "sum", "fp32"),
        (chunk - min(33, chunk // 2), "max", "fp16"),
        (2 * chunk + 5, "average", "bf16"),
        (500, "max", "fp32"),
    ):
        await bench.reduce(size, op, wire)
    bench.end("sums")


@cocotb.test()
@cocotb.parametrize(mode=list(STALLS))
async def a_job_that_is_halted_leaves_nothing_behind(dut: object, mode: str) -> None:
    """After some cycles, wherever that is in the job; and then a whole one."""
    bench = CoresBench(dut, mode)
    await bench.begin()
    for cycles in (5, 70, 150, 400):
        bench.load(LONG)
        for core in bench.cores:
            await bench.give(core, LONG, "sum", "fp32")
        await ClockCycles(dut.clk, cycles)
        await bench.halt()
        for core in bench.cores:
            assert not core.done, "it was halted too late"
        await bench.reduce(300, "sum", "fp32")
        for core in bench.cores:
            core.done = 0
    bench.end("halted")
