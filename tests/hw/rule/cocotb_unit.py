# amaranth: UnusedElaboratable=no
"""Drives the functional unit of Adam cycle by cycle: bubbles, stalls, and reset in mid-run."""

import os
from collections import deque

import cocotb
import numpy as np
from cocotb.clock import Clock
from cocotb.triggers import FallingEdge, RisingEdge

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.golden.rule_cpp import register_words
from nearstep_spec.rule.adam import ADAM, adam_scalars

SEED = int(os.environ["NEARSTEP_SEED"])
COUNT = 100
CHANCES = {"free": (0.0, 0.0), "source": (0.0, 0.6), "sink": (0.6, 0.0), "both": (0.4, 0.4)}


class Bench:
    """The unit, its operands, and the results its model expects in order."""

    def __init__(self, dut: object, seed: int, decoupled: bool) -> None:
        self.dut = dut
        self.rng = np.random.default_rng(seed)
        arrays = {name: self.rng.standard_normal(COUNT, np.float32) for name in ADAM.arrays_in}
        arrays["v"] = np.abs(arrays["v"])
        self.operands = {name: array.view(np.uint32) for name, array in arrays.items()}
        self.scalars = adam_scalars(1e-3, (0.9, 0.999), 1e-8, 0.01, 2, decoupled)
        results = evaluate(ADAM, arrays, self.scalars)
        rows = zip(*(results[name].view(np.uint32).tolist() for name in "pmv"), strict=True)
        self.expected = deque(rows)
        self.compared = 0

    async def reset(self) -> None:
        self.dut.i_en.value = 1
        self.dut.i_valid.value = 0
        words = register_words(ADAM, self.scalars).tolist()
        for name, word in zip(ADAM.registers(), words, strict=True):
            getattr(self.dut, f"s_{name}").value = word
        self.dut.rst.value = 1
        await FallingEdge(self.dut.clk)
        await FallingEdge(self.dut.clk)
        self.dut.rst.value = 0

    def outputs(self) -> tuple[int, ...]:
        names = ("o_valid", "o_p", "o_m", "o_v")
        return tuple(int(getattr(self.dut, name).value) for name in names)

    async def cycle(self, element: int | None, enabled: bool) -> None:
        """One clock cycle; compares what leaves in it."""
        dut = self.dut
        dut.i_en.value = int(enabled)
        dut.i_valid.value = int(element is not None)
        for name, words in self.operands.items():
            noise = int(self.rng.integers(2**32))
            getattr(dut, f"i_{name}").value = noise if element is None else int(words[element])
        before = self.outputs()
        await RisingEdge(dut.clk)
        await FallingEdge(dut.clk)
        after = self.outputs()
        if not enabled:
            assert after == before, "an output changed although i_en was 0"
        elif after[0]:
            assert after[1:] == self.expected.popleft(), f"result {self.compared}"
            self.compared += 1


@cocotb.test()
@cocotb.parametrize(stall=list(CHANCES), decoupled=[False, True])
async def every_result_equals_the_model(dut: object, stall: str, decoupled: bool) -> None:
    cocotb.start_soon(Clock(dut.clk, 10, unit="ns").start())
    bench = Bench(dut, SEED, decoupled)
    await bench.reset()
    stalls, bubbles = CHANCES[stall]
    element, cycles = 0, 0
    while bench.expected:
        enabled = bench.rng.random() >= stalls
        send = element < COUNT and bench.rng.random() >= bubbles
        await bench.cycle(element if send else None, enabled)
        element += enabled and send
        cycles += 1
        assert cycles < 20 * COUNT, f"{len(bench.expected)} results never came"
    assert bench.compared == COUNT
    dut._log.info("seed %d: %d results compared in %d cycles", SEED, bench.compared, cycles)


@cocotb.test()
async def reset_in_mid_run_forgets_what_is_in_flight(dut: object) -> None:
    cocotb.start_soon(Clock(dut.clk, 10, unit="ns").start())
    bench = Bench(dut, SEED + 1, False)
    await bench.reset()
    latency = FunctionalUnit(ADAM).latency
    for element in range(latency - 1):
        await bench.cycle(element, True)
    assert bench.compared == 0
    await bench.reset()
    for _ in range(2 * latency):
        await bench.cycle(None, True)
    assert bench.compared == 0
    for element in range(COUNT + latency - 1):
        await bench.cycle(element if element < COUNT else None, True)
    assert bench.compared == COUNT
