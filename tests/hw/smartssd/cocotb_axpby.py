"""Drives two lanes of the AXPBY unit cycle by cycle: four stall modes, and reset in mid-run."""

import os
from collections import deque

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import FallingEdge

from nearstep_sim.golden.rule import evaluate
from nearstep_sim.golden.rule_cpp import register_words
from nearstep_spec.rule.axpby import AXPBY

SEED = int(os.environ["NEARSTEP_SEED"])
COUNT = 200
SCALARS = {"a": 0.9, "b": -0.30000001}
CHANCES = {"free": (0.0, 0.0), "source": (0.6, 0.0), "sink": (0.0, 0.6), "both": (0.5, 0.5)}


def _wide(low: int, high: int) -> int:
    return low | high << 32


class Bench:
    def __init__(self, dut: object, seed: int) -> None:
        self.dut = dut
        self.rng = np.random.default_rng(seed)
        x, y = (self.rng.standard_normal((COUNT, 2)).astype(np.float32) for _ in range(2))
        z = evaluate(AXPBY, {"x": x, "y": y}, SCALARS)["z"]
        rows = [[_wide(*row) for row in each.view(np.uint32).tolist()] for each in (x, y, z)]
        self.sent = deque(low | high << 64 for low, high in zip(*rows[:2], strict=True))
        self.expected = deque(rows[2])
        self.compared = 0

    async def reset(self) -> None:
        dut = self.dut
        a, b = register_words(AXPBY, SCALARS).tolist()
        dut.a.value, dut.b.value = a, b
        dut.i__valid.value, dut.o__ready.value, dut.rst.value = 0, 0, 1
        await FallingEdge(dut.clk)
        await FallingEdge(dut.clk)
        dut.rst.value = 0

    async def run(self, source: float, sink: float) -> int:
        """Cycles until every result came."""
        dut, offered, cycles, waiting = self.dut, False, 0, None
        while self.expected:
            if not offered:
                offered = bool(self.sent) and self.rng.random() >= source
                noise = int(self.rng.integers(2**63))
                dut.i__payload.value = self.sent[0] if offered else noise
                dut.i__valid.value = int(offered)
            dut.o__ready.value = int(self.rng.random() >= sink)
            await cocotb.triggers.ReadOnly()
            taken = offered and int(dut.i__ready.value)
            valid, ready = int(dut.o__valid.value), int(dut.o__ready.value)
            if waiting is not None:
                assert valid, "a result was withdrawn"
                assert int(dut.o__payload.value) == waiting, "a result changed while it waited"
            waiting = None
            if valid and ready:
                assert int(dut.o__payload.value) == self.expected.popleft()
                self.compared += 1
            elif valid:
                waiting = int(dut.o__payload.value)
            await FallingEdge(dut.clk)
            if taken:
                self.sent.popleft()
                offered = False
            cycles += 1
            assert cycles < 30 * COUNT, f"{len(self.expected)} results never came"
        return cycles


@cocotb.test()
@cocotb.parametrize(mode=list(CHANCES))
async def every_result_equals_the_model(dut: object, mode: str) -> None:
    cocotb.start_soon(Clock(dut.clk, 10, unit="ns").start())
    bench = Bench(dut, SEED)
    await bench.reset()
    cycles = await bench.run(*CHANCES[mode])
    assert bench.compared == COUNT
    dut._log.info("seed %d: %d results compared in %d cycles", SEED, bench.compared, cycles)


@cocotb.test()
async def reset_forgets_what_is_in_flight(dut: object) -> None:
    cocotb.start_soon(Clock(dut.clk, 10, unit="ns").start())
    bench = Bench(dut, SEED + 1)
    await bench.reset()
    dut.i__valid.value, dut.i__payload.value = 1, 12345
    for _ in range(3):
        await FallingEdge(dut.clk)
    await bench.reset()
    await bench.run(0.2, 0.2)
    assert bench.compared == COUNT
