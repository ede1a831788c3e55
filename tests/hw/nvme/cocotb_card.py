"""`nvme_card` as it is written, beside the controller in Python."""

import os
from contextlib import closing

import cocotb
from cocotb.clock import Clock
from cocotb.triggers import ClockCycles, RisingEdge
from engine_bench import Alone, Bench, Pair, RandomResets, Traffic

from nearstep_spec.nvme import NvmeConfig

CONFIG = NvmeConfig()
SEED = int(os.environ["NEARSTEP_SEED"])
COUNT = int(os.environ["NEARSTEP_COUNT"])
STALL = os.environ["NEARSTEP_STALL"]


class CocotbPins:
    """Ports of the top."""

    def __init__(self, dut: object) -> None:
        self._dut = dut
        self._handles: dict[str, object] = {}
        self._driven: dict[str, int] = {}

    def _handle(self, name: str) -> object:
        if name not in self._handles:
            self._handles[name] = getattr(self._dut, name)
        return self._handles[name]

    def get(self, name: str) -> int:
        return int(self._handle(name).value)

    def set(self, name: str, value: int) -> None:
        if self._driven.get(name) != value:
            self._driven[name] = value
            self._handle(name).value = int(value)


async def run(dut: object, bench: Bench, script: object) -> None:
    """Run a script on a design after a reset."""
    dut.rst.value = 1
    cocotb.start_soon(Clock(dut.clk, 10, "ns").start())
    await ClockCycles(dut.clk, 3)
    dut.rst.value = 0
    for _ in script:
        await RisingEdge(dut.clk)
        bench.step()


@cocotb.test()
async def it_does_what_the_controller_in_python_does(dut: object) -> None:
    options = {"stall": STALL, "seed": SEED, "msix": True}
    with closing(Pair(CocotbPins(dut), CONFIG, **options)) as pair:
        traffic = Traffic(pair)
        await run(dut, pair.bench, traffic.run(COUNT))
        pair.bench.checker.finish()
    cocotb.log.info("%s: %d checks", traffic.done, pair.checks)
    assert sum(traffic.done.values()) == COUNT
    assert pair.checks >= 10 * COUNT


@cocotb.test()
async def nothing_begins_once_it_is_disabled(dut: object) -> None:
    alone = Alone(CocotbPins(dut), CONFIG, stall=STALL, seed=SEED, msix=True)
    resets = RandomResets(alone)
    await run(dut, alone.bench, resets.run(COUNT))
    alone.bench.checker.finish()
    cocotb.log.info("%d of %d commands completed: %d checks", *resets.completed, alone.checks)
    assert alone.checks >= 3 * COUNT
    assert 0 < resets.completed[0] < resets.completed[1]
