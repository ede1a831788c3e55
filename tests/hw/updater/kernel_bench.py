"""What the cocotb benches of the Adam kernel share: registers, memory, a run and its check."""

import json
import logging
import os
import random
from dataclasses import asdict

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, RisingEdge
from cocotbext.axi import AxiBus, AxiLiteBus, AxiLiteMaster, AxiRam
from numpy.typing import NDArray

from nearstep_sim.bench.axi_checker import AxiChecker
from nearstep_sim.bench.axi_memory import STALL_MODES, AxiMemory
from nearstep_sim.bench.cocotb_axi import AxiPort
from nearstep_sim.golden import blockwise
from nearstep_sim.golden import rule as golden
from nearstep_sim.updater.stand_in import stand_in_results
from nearstep_spec.blockwise import SIGNED
from nearstep_spec.rule.adam import ORDERS
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.operands import array_bytes, operands
from nearstep_spec.updater.registers import ARRAYS, adam_kernel_map, update_rule

CONFIG = UpdateKernelConfig(**json.loads(os.environ["NEARSTEP_CONFIG"]))
IS_STAND_IN = os.environ["NEARSTEP_UNIT"] == "stand_in"
SEED = int(os.environ.get("NEARSTEP_SEED", "1"))
MEMORY_BYTES = max(1 << 16, 128 * CONFIG.block_bytes)  # four arrays of up to 31 blocks
SCALARS = ORDERS[CONFIG.order][1](1e-3, (0.9, 0.999), 1e-8, 0.01, 3, True)
STATES = ("p", "m", "v")
FORMATS = {name: operands(CONFIG)[name].format for name in ARRAYS}

Words = NDArray[np.uint32]


def size(name: str, count: int) -> int:
    """Bytes of an array of `count` elements."""
    return array_bytes(CONFIG, FORMATS[name], count)


def beats(name: str, count: int) -> int:
    """Beats that moving it takes: in 8 bits, of scales and of codes."""
    if FORMATS[name] not in SIGNED:
        return -(-size(name, count) // CONFIG.beat_bytes)
    return -(-count // CONFIG.block_elements) + -(-count // CONFIG.beat_bytes)


def loaded(name: str, data: NDArray[np.uint8]) -> Words:
    """The binary32 patterns of an array's elements, from its bytes."""
    form = FORMATS[name]
    if form not in SIGNED:
        return data.view(np.uint32)
    given = blockwise.unpack(data, **asdict(CONFIG.block_layout))
    return blockwise.dequantize(given, signed=SIGNED[form]).view(np.uint32)


def stored(name: str, words: Words) -> NDArray[np.uint8]:
    """The bytes of an array with these elements."""
    form = FORMATS[name]
    if form not in SIGNED:
        return words.view(np.uint8)
    made = blockwise.quantize(words.view(np.float32), signed=SIGNED[form])
    return blockwise.pack(made, **asdict(CONFIG.block_layout))


def results(arrays: dict[str, NDArray[np.uint8]]) -> dict[str, NDArray[np.uint8]]:
    """What a run must leave in p, m and v: bytes of bytes."""
    words = {name: loaded(name, data) for name, data in arrays.items()}
    if IS_STAND_IN:
        out = stand_in_results(words)
    else:
        floats = {name: each.view(np.float32) for name, each in words.items()}
        made = golden.evaluate(update_rule(CONFIG), floats, SCALARS)
        out = {name: values.view(np.uint32) for name, values in made.items()}
    return {name: stored(name, values) for name, values in out.items()}


class KernelBench:
    """A kernel with memory and checker on its port, and a host on its registers.

    Memory is filled with words that are all different, and compared as a whole after a run, so
    everything around the arrays is a guard. With `ram`, memory is cocotbext-axi's `AxiRam`.
    """

    def __init__(self, dut: object, *, seed: int = SEED, ram: bool = False) -> None:
        self.dut = dut
        self.random = random.Random(seed)
        self.map = adam_kernel_map(CONFIG)
        words = np.random.default_rng(seed).permutation(MEMORY_BYTES // 4).astype(np.uint32)
        if not IS_STAND_IN:  # numbers of moderate size; v must not be negative
            words = (words.astype(np.float32) * np.float32(1e-4)).view(np.uint32)
        self.data = words.view(np.uint8).copy()
        self.memory = None
        if not ram:
            self.memory = AxiMemory(self.data, beat_bytes=CONFIG.beat_bytes, seed=seed)
        self.checker = AxiChecker(beat_bytes=CONFIG.beat_bytes, read_ids=4, write_ids=3)
        self.port = AxiPort(dut, "m_axi", checker=self.checker, memory=self.memory)
        self.base = dict.fromkeys(ARRAYS, 0)
        self.checks = 0
        logging.getLogger("cocotb.adam_kernel").setLevel(logging.WARNING)  # every access

    async def begin(self) -> None:
        dut = self.dut
        cocotb.start_soon(Clock(dut.clk, 5, unit="ns").start())
        dut.rst.value = 1
        bus = AxiLiteBus.from_prefix(dut, "s_axil", bus_separator="__", case_insensitive=False)
        self.host = AxiLiteMaster(bus, dut.clk, dut.rst)
        if self.memory is None:
            bus = AxiBus.from_prefix(dut, "m_axi", bus_separator="__", case_insensitive=False)
            content = bytearray(self.data.tobytes())
            self.ram = AxiRam(bus, dut.clk, dut.rst, mem=content)
            self.data = np.frombuffer(content, np.uint8)
        cocotb.start_soon(self.port.run())
        await ClockCycles(dut.clk, 5)
        dut.rst.value = 0
        await ClockCycles(dut.clk, 2)

    def disturb(
        self,
        mode: str = "free",
        *,
        latency: int = 1,
        reorder: bool = False,
        address_after_data: bool = False,
    ) -> None:
        """How the memory behaves from now on."""
        memory = self.memory
        memory.stalls, memory.latency, memory.reorder = STALL_MODES[mode], latency, reorder
        memory.address_after_data = address_after_data

    async def write(self, name: str, value: int) -> int:
        """Write a register; the worst bus response."""
        register = self.map[name]
        worst = 0
        for index in range(register.words):
            word = (value >> 32 * index) & 0xFFFFFFFF
            answer = await self.host.write(register.offset + 4 * index, word.to_bytes(4, "little"))
            worst = max(worst, int(answer.resp))
        return worst

    async def read(self, path: str) -> int:
        """Read `register.field`."""
        register, field = self.map.lookup(path)
        answer = await self.host.read(register.offset, register.width // 8)
        value = int.from_bytes(answer.data, "little")
        return (value & field.mask) >> field.lsb

    def place(self, count: int, *, aligned: int | None = None) -> None:
        """Random places for arrays of `count` elements, a multiple of `aligned` bytes apart from
        each other by at least one beat."""
        step = aligned or CONFIG.beat_bytes
        quarter = MEMORY_BYTES // 4
        room = quarter - max(size(name, count) for name in ARRAYS) - CONFIG.beat_bytes
        order = self.random.sample(range(4), 4)
        for name, index in zip(ARRAYS, order, strict=True):
            self.base[name] = index * quarter + self.random.randrange(0, room) // step * step

    async def configure(self, count: int) -> None:
        for name, address in self.base.items():
            await self.write(f"{name}_address", address)
        await self.write("count", count)
        rule = update_rule(CONFIG)
        for name in rule.scalars:
            await self.write(name, int(np.float32(SCALARS[name]).view(np.uint32)))
        mode = sum(int(SCALARS[name]) << index for index, name in enumerate(rule.switches))
        await self.write("mode", mode)
        await self.grant(0, 0, MEMORY_BYTES, 0b111)

    async def grant(self, index: int, base: int, limit: int, permissions: int) -> None:
        await self.write(f"window{index}_base", base)
        await self.write(f"window{index}_limit", limit)
        await self.write(f"window{index}_permissions", permissions)

    async def go(self) -> int:
        return await self.write("start", 1)

    async def until_idle(self, limit: int = 200000) -> None:
        """Wait in cycles of the device, on the status register."""
        start = self.checker.cycles
        while await self.read("status.busy"):
            waited = self.checker.cycles - start
            assert waited < limit, f"busy after {waited} cycles, limit {limit}"
            await RisingEdge(self.dut.clk)

    def arrays(self, count: int) -> dict[str, NDArray[np.uint8]]:
        """The bytes of each array."""
        return {n: self.data[a : a + size(n, count)].copy() for n, a in self.base.items()}

    def expected(self, count: int) -> NDArray[np.uint8]:
        """The whole memory after a run of `count` elements from now."""
        after = self.data.copy()
        for name, values in results(self.arrays(count)).items():
            at = self.base[name]
            after[at : at + values.size] = values
        return after

    def compare(self, after: NDArray[np.uint8]) -> None:
        different = np.flatnonzero(self.data != after)
        where = [hex(int(i)) for i in different[:8]]
        assert not different.size, f"{different.size} bytes differ, first {where}"
        self.checks += after.size

    async def run(self, count: int) -> None:
        """A whole run, from registers to compared memory and counters."""
        await self.configure(count)
        after = self.expected(count)
        assert await self.go() == 0
        await self.until_idle()
        self.checker.finish()
        await self.outcome(done=1, cause=0, stream=0, response=0, address=0, committed=count)
        assert await self.read("read_beats.value") == sum(beats(n, count) for n in ARRAYS)
        assert await self.read("write_beats.value") == sum(beats(n, count) for n in STATES)
        self.compare(after)

    async def outcome(self, **wanted: int) -> None:
        """Compare status, error and committed; only those named."""
        paths = {
            "done": "status.done",
            "error": "status.error",
            "cause": "error.cause",
            "stream": "error.stream",
            "response": "error.response",
            "address": "error_address.value",
            "committed": "committed.value",
            "refused": "status.refused",
        }
        for name, value in wanted.items():
            found = await self.read(paths[name])
            assert found == value, f"{paths[name]} is {found:#x}, expected {value:#x}"
            self.checks += 1
