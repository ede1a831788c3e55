"""The module with two channels: one driver, on one host bus, runs both kernels."""

import json
import os
from collections.abc import Sequence

import cocotb
import numpy as np
from adam_run import AdamRun
from cocotb.clock import Clock
from cocotb.task import bridge, resume
from cocotb.triggers import ClockCycles, RisingEdge

from nearstep_hw.axdimm.host_front_end import HOST_READ_LATENCY, HOST_WRITE_LATENCY
from nearstep_sim.axdimm.module import ModuleDriver
from nearstep_sim.bench.cocotb_dram import DfiRank, HostBus
from nearstep_sim.models.dram.device import Ddr4Device
from nearstep_sim.models.dram.host import HostConfig, HostController
from nearstep_sim.updater.stand_in import stand_in_results
from nearstep_spec.axdimm.registers import IDENT, channel_maps
from nearstep_spec.dram.timing import dram_timing
from nearstep_spec.updater.config import UpdateKernelConfig

CONFIG = UpdateKernelConfig(**json.loads(os.environ["NEARSTEP_CONFIG"]))
SEED = int(os.environ.get("NEARSTEP_SEED", "1"))
LATENCIES = {"read_latency": HOST_READ_LATENCY, "write_latency": HOST_WRITE_LATENCY}


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
        dfi: Sequence[str] = ("dfi0", "dfi1"),
        kernel: UpdateKernelConfig = CONFIG,
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


def drive(module: Module) -> int:
    """Runs on both channels; the host works on each while the other computes. Words compared."""
    compared = 0
    rng = np.random.default_rng(SEED)
    runs = [AdamRun(module, c, 200 + c, SEED + c, results=stand_in_results) for c in (0, 1)]
    for run in runs:
        assert module.get(run.channel, "arbiter.id.value") == IDENT
        run.configure()
    for run, other in zip(runs, reversed(runs), strict=True):
        run.mode(1)
        run.start()
        data = rng.integers(0, 256, 64 * 8, dtype=np.uint8)
        module.store(other.channel, 0, data)
        assert np.array_equal(module.load(other.channel, 0, data.size), data)
        module.wait(run.channel, "adam.status.done", 1, 20_000)
        run.mode(0)
        compared += run.check()
    # Both at once.
    runs = [AdamRun(module, c, 150, SEED + 7 + c, results=stand_in_results) for c in (0, 1)]
    for run in runs:
        run.configure()
        run.mode(1)
        run.start()
    assert [module.get(run.channel, "adam.status.busy") for run in runs] == [1, 1]
    for run in runs:
        module.wait(run.channel, "adam.status.done", 1, 20_000)
        run.mode(0)
        compared += run.check()
        assert module.get(run.channel, "arbiter.status.refused_access") == 0
    return compared


@cocotb.test()
@cocotb.parametrize(stall=[0.0, 0.3])
async def both_channels_run(dut: object, stall: float) -> None:
    module = Module(dut, stall=stall)
    await module.begin()
    compared = await bridge(drive)(module)
    assert compared == 2 * 4 * (208 + 160)
    print(f"seed {SEED}, stall {stall}: {compared} words compared in {module.host.cycle} cycles")
