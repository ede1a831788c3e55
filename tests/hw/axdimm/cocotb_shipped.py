"""A shipped top of the AXDIMM family, its units in it: a driver runs the kernels, and memory must
hold what the golden model makes of it.

The tops have no port with a handshake: neither a host bus nor DFI can hold a command back. What
stalls is the host: it idles between commands, or takes accesses in order and owes refreshes, or
both.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.task import bridge, resume
from cocotb.triggers import ClockCycles, RisingEdge

from nearstep_hw.axdimm.host_front_end import HOST_READ_LATENCY, HOST_WRITE_LATENCY
from nearstep_sim.axdimm.module import ModuleDriver
from nearstep_sim.bench.cocotb_dram import DfiRank, HostBus
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.models.dram.device import Ddr4Device
from nearstep_sim.models.dram.host import HostConfig, HostController
from nearstep_spec.axdimm.registers import IDENT, channel_maps
from nearstep_spec.dram.timing import dram_timing
from nearstep_spec.rule.rules import optimizer_named
from nearstep_spec.updater.config import UpdateKernelConfig

BASES = {"p": 0x10_0000, "g": 0x20_0040, "m": 0x30_0080, "v": 0x40_00C0}
"""Byte addresses in a channel: in different banks, not at the start of a row."""
LATENCIES = {"read_latency": HOST_READ_LATENCY, "write_latency": HOST_WRITE_LATENCY}
Words = np.ndarray[tuple[int], np.dtype[np.uint32]]
CONFIG = UpdateKernelConfig(**json.loads(os.environ["NEARSTEP_CONFIG"]))
PORTS = json.loads(os.environ["NEARSTEP_DFI"])
"""Names of the DFI ports, one for each channel."""
SEED = int(os.environ.get("NEARSTEP_SEED", "1"))
MODES = {
    "free": {},
    "idle": {"stall": 0.3},
    "owing": {"scheduler": "in-order", "postpone": 8},
    "idle and owing": {"stall": 0.3, "scheduler": "in-order", "postpone": 8},
}
HYPER = {
    "lr": 3e-3,
    "betas": (0.9, 0.99),
    "eps": 1e-7,
    "weight_decay": 0.05,
    "decoupled_weight_decay": True,
}
SPECIALS = np.array(
    [0, 0x8000_0000, 1, 0x807F_FFFF, 0x0080_0000, 0x7F7F_FFFF, 0x7F80_0000, 0xFF80_0000,
     0x7FC0_0000, 0x7F80_0001, 0xFFFF_FFFF],
    np.uint32,
)  # fmt: skip


class Module(ModuleDriver):
    """The driver's calls are made in a thread, and time passes in the simulator.

    Parameters
    ----------
    dut
    dfi : names of its DFI ports, one for each channel.
    kernel : configuration of the kernels.
    host : more of `HostConfig`.
    """

    def __init__(
        self,
        dut: object,
        *,
        dfi: Sequence[str],
        kernel: UpdateKernelConfig,
        **host: object,
    ) -> None:
        self.dut = dut
        self.dfi = dfi
        config = HostConfig(ranks=len(dfi), seed=SEED, **LATENCIES, **host)
        self.host = HostController(config)
        self.capacity = config.geometry.capacity_bytes
        self.maps = channel_maps(kernel, config.address_mapping, **LATENCIES)
        self.devices = tuple(Ddr4Device(dram_timing(), rank=c) for c in range(len(dfi)))

    async def begin(self) -> None:
        dut = self.dut
        cocotb.start_soon(Clock(dut.clk, 5, unit="ns").start())
        dut.rst.value = 1
        ranks = [
            DfiRank(dut, name, device) for name, device in zip(self.dfi, self.devices, strict=True)
        ]
        bus = HostBus(dut, "host", self.host, ranks=len(self.dfi))
        await ClockCycles(dut.clk, 4)
        dut.rst.value = 0
        for each in (*ranks, bus):
            cocotb.start_soon(each.run())

    def run(self, cycles: int, *, until_idle: bool = False) -> int:
        return resume(self._run)(cycles, until_idle)

    async def _run(self, cycles: int, until_idle: bool) -> int:
        for ran in range(cycles):
            if until_idle and self.host.idle:
                return ran
            await RisingEdge(self.dut.clk)
        return cycles


class AdamRun:
    """An Adam run on one channel, as a driver does it.

    `results` makes the arrays after a run from those before.
    """

    def __init__(
        self,
        bench: ModuleDriver,
        channel: int,
        count: int,
        seed: int,
        *,
        results: Callable[[dict[str, Words]], dict[str, Words]],
    ) -> None:
        self.bench, self.channel, self.count, self.results = bench, channel, count, results
        rng = np.random.default_rng(seed)
        padded = -(-count // 16) * 16
        self.arrays: dict[str, Words] = {
            name: rng.integers(0, 1 << 32, padded, dtype=np.uint32) for name in BASES
        }
        self.bases = dict(BASES)
        for name, words in self.arrays.items():
            bench.store(channel, BASES[name], words.view(np.uint8))

    def configure(self, *, reach: int | None = None) -> None:
        """Arrays, and one window over all of them that ends at `reach`."""
        line = {f"adam.{name}_address.value": base for name, base in self.bases.items()}
        self.bench.set(self.channel, {**line, "adam.count.value": self.count})
        window = "adam.window0"
        permissions = ("read", "write", "valid")
        self.bench.set(
            self.channel,
            {
                f"{window}_base.value": 0,
                f"{window}_limit.value": 0x50_0000 if reach is None else reach,
                **{f"{window}_permissions.{bit}": 1 for bit in permissions},
            },
        )

    def mode(self, acceleration: int) -> None:
        name = "acceleration" if acceleration else "normal"
        self.bench.set(self.channel, {"arbiter.mode.acceleration": acceleration})
        self.bench.wait(self.channel, f"arbiter.status.{name}", 1, 20_000)

    def start(self) -> None:
        self.bench.set(self.channel, {"adam.start.go": 1})

    def check(self) -> int:
        """Compare memory with the expected results, guards included. Words compared."""
        results = self.results(self.arrays)
        compared = 0
        for name in BASES:
            words = self.arrays[name]
            expected = words.copy()
            if name in results:
                expected[: self.count] = results[name][: self.count]
            found = self.bench.load(self.channel, self.bases[name], 4 * len(words)).view(np.uint32)
            assert np.array_equal(found, expected), f"{name} of channel {self.channel}"
            compared += len(words)
        return compared


class GoldenRun(AdamRun):
    """A step of Adam on one channel, of any bit patterns, a fifth of them special ones."""

    def __init__(self, module: Module, channel: int, count: int, seed: int, step: int) -> None:
        optimizer = optimizer_named("adam")
        values = optimizer.defaults | HYPER
        form = optimizer.form(values).ordered(CONFIG.order)
        self.scalars = form.registers(values, step, False)

        def results(arrays: Mapping[str, Words]) -> dict[str, Words]:
            given = {name: words.view(np.float32) for name, words in arrays.items()}
            made = evaluate(form.rule, given, self.scalars)
            return {name: array.view(np.uint32) for name, array in made.items()}

        super().__init__(module, channel, count, seed, results=results)
        rng = np.random.default_rng(seed + 1000)
        for name, words in self.arrays.items():
            special = rng.random(words.size) < 0.2
            words[special] = rng.choice(SPECIALS, special.sum())
            module.store(channel, self.bases[name], words.view(np.uint8))

    def configure(self, *, reach: int | None = None) -> None:
        super().configure(reach=reach)
        for name, value in self.scalars.items():
            if isinstance(value, int):
                self.bench.set(self.channel, {f"adam.mode.{name}": value})
            else:
                bits = int(np.float32(value).view(np.uint32))
                self.bench.set(self.channel, {f"adam.{name}.value": bits})

    def whole(self) -> int:
        """Wait for its end, and compare it, with the channel the host's again."""
        self.bench.wait(self.channel, "adam.status.done", 1, 20_000)
        assert self.bench.get(self.channel, "adam.committed.value") == self.count
        self.mode(0)
        assert self.bench.get(self.channel, "arbiter.status.refused_access") == 0
        return self.check()


def drive(module: Module) -> int:
    """Each channel by itself with the host on the others, then all at once. Words compared.

    One of them is given back to the host in the midst of its run.
    """
    compared = 0
    rng = np.random.default_rng(SEED)
    channels = range(len(PORTS))
    for channel in channels:
        run = GoldenRun(module, channel, 147 + channel, SEED + channel, 1 + channel)
        assert module.get(channel, "arbiter.id.value") == IDENT
        run.configure()
        run.mode(1)
        run.start()
        for other in channels:
            if other != channel:
                data = rng.integers(0, 256, 64 * 8, dtype=np.uint8)
                module.store(other, 0, data)
                assert np.array_equal(module.load(other, 0, data.size), data)
        compared += run.whole()
    runs = [GoldenRun(module, c, 210 - 3 * c, SEED + 7 + c, 100) for c in channels]
    for run in runs:
        run.configure()
        run.mode(1)
    for run in runs:
        run.start()
    runs[0].mode(0)
    assert module.get(0, "adam.status.busy") == 1
    runs[0].mode(1)
    return compared + sum(run.whole() for run in runs)


@cocotb.test()
@cocotb.parametrize(mode=list(MODES))
async def kernels_give_the_golden_bits(dut: object, mode: str) -> None:
    module = Module(dut, dfi=PORTS, kernel=CONFIG, **MODES[mode])
    await module.begin()
    compared = await bridge(drive)(module)
    assert compared == 4 * sum(160 + 224 - 16 * (c > 0) for c in range(len(PORTS)))
    print(f"seed {SEED}, {mode}: {compared} words compared in {module.host.cycle} cycles")
