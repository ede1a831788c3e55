"""The queue engine and its parts in Amaranth's simulator, beside the controller in Python."""

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import closing

import pytest
from amaranth.hdl import Cat
from amaranth.sim import SimulatorContext

from nearstep.linux.nvme.standard import StatusError
from nearstep.linux.nvme.transfer import segments
from nearstep.linux.pci import DmaError
from nearstep_hw.nvme.engine import QueueEngine
from nearstep_hw.nvme.layout import PartLayout, WalkLayout
from nearstep_hw.nvme.walker import PrpWalker
from nearstep_hw.verilog import _flat
from nearstep_sim.bench.axi_memory import STALL_MODES
from nearstep_sim.bench.axi_sample import Address, AxiSample
from nearstep_spec.nvme import EngineStatus, NvmeConfig

from ..simulate import simulate
from .engine_bench import REQUESTS, HostMemory, Pair, Ram, Traffic, transfer

CONFIG = NvmeConfig(io_queues=5)


class SimulatedPins:
    """Ports of a component in Amaranth's simulator, all sampled and driven at once."""

    def __init__(self, component: object) -> None:
        self._places: dict[str, tuple[int, int]] = {}
        ways: dict[str, list] = {"input": [], "output": []}
        at = {"input": 0, "output": 0}
        for port in _flat(component):
            way = port.direction.value
            self._places[port.name] = at[way], (1 << len(port.value)) - 1
            at[way] += len(port.value)
            ways[way].append(port.value)
        self.inputs, self.outputs = Cat(ways["input"]), Cat(ways["output"])
        self.driven = self.sampled = 0

    def get(self, name: str) -> int:
        first, mask = self._places[name]
        return self.sampled >> first & mask

    def set(self, name: str, value: int) -> None:
        first, mask = self._places[name]
        self.driven = self.driven & ~(mask << first) | (int(value) & mask) << first


def run(design: object, pins: SimulatedPins, bench: object, script: object) -> None:
    """Run a script on a design."""

    async def testbench(ctx: SimulatorContext) -> None:
        driven = None
        for _ in script:
            if pins.driven != driven:
                driven = pins.driven
                ctx.set(pins.inputs, driven)
            _, _, pins.sampled = await ctx.tick().sample(pins.outputs)
            bench.step()

    simulate(design, testbench)


class WalkBench:
    """Memory of a host, and the other side of a walker."""

    def __init__(self, pins: SimulatedPins, ram: Ram, stall: str, seed: int) -> None:
        self.pins = pins
        self.axi = HostMemory(ram.memory, beat_bytes=16, stalls=STALL_MODES[stall], seed=seed)
        self.draw = random.Random(seed)
        self.stalls = stall in ("sink", "both")
        self.parts: list[tuple[int, int]] = []
        self.status: int | None = None
        self.reads = 0
        self._show_ready()

    def step(self) -> None:
        pins, sample = self.pins, AxiSample(r=self.axi.r)
        if pins.get("bus__arvalid"):
            sample.ar = Address(*(pins.get(f"bus__ar{each}") for each in REQUESTS["ar"][1]))
        sample.ready = frozenset({*self.axi.ready, "r"})
        self.reads += sample.fires("ar")
        if self.ready and pins.get("o__valid"):
            part = PartLayout.from_bits(pins.get("o__payload"))
            if part.end:
                self.status = int(part.status)
            else:
                self.parts.append((int(part.address), int(part.nbytes)))
        pins.set("i__valid", 0)
        self.axi.step(sample)
        pins.set("bus__arready", "ar" in self.axi.ready)
        pins.set("bus__rvalid", self.axi.r is not None)
        for name, value in zip(("id", "data", "resp", "last"), self.axi.r or (), strict=False):
            pins.set(f"bus__r{name}", value)
        self._show_ready()

    def _show_ready(self) -> None:
        self.ready = not self.stalls or self.draw.random() < 0.5
        self.pins.set("o__ready", self.ready)

    def walk(self, prp1: int, prp2: int, nbytes: int) -> Iterator[None]:
        given = {"io": 1, "prp1": prp1, "prp2": prp2, "nbytes": nbytes}
        self.pins.set("i__payload", WalkLayout.const(given).as_value().value)
        self.pins.set("i__valid", 1)
        self.parts, self.status, self.reads = [], None, 0
        while self.status is None:
            yield


def expected(ram: Ram, prp1: int, prp2: int, nbytes: int) -> tuple[list[tuple[int, int]], int]:
    """Parts and status of the walk in Python, as far as it gets."""
    parts: list[tuple[int, int]] = []
    try:
        parts.extend(segments(ram, prp1, prp2, nbytes))
    except StatusError as refused:
        return parts, refused.status
    except DmaError:
        return parts, EngineStatus.DATA_TRANSFER_ERROR
    return parts, 0


@pytest.mark.parametrize(
    ("stall", "count", "pages"),
    [
        ("free", 160, 12),
        *(pytest.param(e, 400, 512, marks=pytest.mark.deep) for e in ("free", "source", "both")),
    ],
)
def test_walks_have_the_parts_and_the_status_of_the_walk_in_python(stall, count, pages):
    ram, dut, seen = Ram(), PrpWalker(), Counter()
    pins = SimulatedPins(dut)
    bench = WalkBench(pins, ram, stall, 1)
    draw = random.Random(f"walk {stall} {pages}")

    def script() -> Iterator[None]:
        for number in range(count):
            asked = transfer(draw, ram.put, pages)
            aborted = number % 4 == 3
            pins.set("i_alive", 1 if aborted else 3)
            yield from bench.walk(*asked)
            parts, status = expected(ram, *asked)
            if aborted:
                assert bench.reads == 0
                seen["aborted"] += bench.status == EngineStatus.DATA_TRANSFER_ERROR
                assert bench.parts == parts[: len(bench.parts)]
            else:
                assert (bench.parts, bench.status) == (parts, status), (number, asked)
            seen[EngineStatus(bench.status).name] += 1
            seen["parts"] += len(parts)

    run(dut, pins, bench, script())
    print(dict(seen))
    assert sum(seen[each.name] for each in EngineStatus) == count
    assert min(seen[e] for e in ("SUCCESS", "PRP_OFFSET_INVALID", "DATA_TRANSFER_ERROR")) >= 2
    assert seen["aborted"] >= 1
    assert seen["parts"] > count


@pytest.mark.parametrize(
    ("stall", "count", "seed"),
    [
        ("both", 11, 1),
        *(pytest.param("free", 40, seed, marks=pytest.mark.deep) for seed in (2, 3)),
    ],
)
def test_the_engine_does_what_the_controller_in_python_does(stall, count, seed):
    dut = QueueEngine(io_queues=CONFIG.io_queues)
    pins = SimulatedPins(dut)
    with closing(Pair(pins, CONFIG, stall=stall, seed=seed)) as pair:
        traffic = Traffic(pair, 4)
        run(dut, pins, pair.bench, traffic.run(count))
    print(f"seed {seed}: {traffic.done}, {pair.checks} values in {pair.bench.cycle} cycles")
    assert sum(traffic.done.values()) == count
    assert pair.checks >= 10 * count
