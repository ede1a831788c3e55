# amaranth: UnusedElaboratable=no
"""The functional unit: area, latency, speed of its RTL and of its C++ kernel on this machine.

Area is that of `synth_xilinx -family xcup`, with both run-time modes and full IEEE 754 behaviour.
Speed of the RTL is that of 16 Verilated objects of one unit, worked through by one core. The kernel
runs beside `torch.optim.Adam(fused=True)`, each on arrays of its own, one thread.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Annotated, Any

import numpy as np
import report
import torch
import typer
from rich.console import Console
from rich.table import Table

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.verilog import to_verilog
from nearstep_sim.bench.functional_unit import VerilatedUnit
from nearstep_sim.golden.rule import evaluate
from nearstep_sim.golden.rule_cpp import kernel
from nearstep_sim.synthesis import ultrascale_plus_area, ultrascale_plus_cells
from nearstep_spec.rule.adam import ORDERS, adam_scalars

LANES = 16
RULE, _ = ORDERS["default"]
HYPER: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
PAPER = {"dsp": 31, "latency_cycles": 128}

console = Console()


def arrays(count: int) -> dict[str, np.ndarray]:
    """Parameters, gradients and moments as in training; each begins at a cache line."""
    rng = np.random.default_rng(0)
    made = {}
    for name in RULE.arrays_in:
        raw = np.empty(count + 16, np.float32)
        begin = -(raw.ctypes.data // 4) % 16
        made[name] = raw[begin : begin + count]
        made[name][:] = rng.standard_normal(count, np.float32)
    np.square(made["v"], out=made["v"])
    return made


def area(order: str) -> dict[str, Any]:
    """Units, latency and cells of one order of operations."""
    rule, _ = ORDERS[order]
    unit = FunctionalUnit(rule)
    cells = ultrascale_plus_cells(to_verilog(unit, "unit"), "unit")
    return {
        "label": "measured (synth_xilinx -family xcup; no place and route)",
        "order": order,
        "units": dict(rule.units()),
        "latency_cycles": unit.latency,
        **ultrascale_plus_area(cells),
        "cells": dict(cells),
    }


def simulation(runs: int, count: int, **options: Any) -> dict[str, Any]:
    """Parameters that 16 units in RTL work through in a second of one core."""
    unit = VerilatedUnit(FunctionalUnit(RULE, **options), lanes=LANES)
    given = arrays(count)
    scalars = adam_scalars(step=3, decoupled_weight_decay=True, **HYPER)
    result = unit.run(given, scalars)
    expected = evaluate(RULE, given, scalars)
    if any((result.arrays[name].view("u4") != expected[name].view("u4")).any() for name in "pmv"):
        raise SystemExit("the unit does not equal its model")
    times = []
    for _ in range(runs):
        start = time.process_time()
        unit.run(given, scalars)
        times.append(time.process_time() - start)
    unit.close()
    return {
        "label": "measured (16 Verilated objects, one core of this machine, processor time)",
        "options": options,
        "latency_cycles": unit.unit.latency,
        "parameters": count,
        "runs": runs,
        "params_per_s": count / statistics.median(times),
    }


def kernel_against_torch(runs: int, count: int = 1 << 22, steps: int = 5) -> dict[str, Any]:
    """The C++ kernel and torch's fused Adam, in turn."""
    torch.set_num_threads(1)
    run, mine = kernel(RULE), arrays(count)
    theirs = torch.nn.Parameter(torch.from_numpy(arrays(count)["p"]))
    theirs.grad = torch.from_numpy(arrays(count)["g"])
    optimizer = torch.optim.Adam([theirs], fused=True, **HYPER)
    scalars = adam_scalars(step=3, decoupled_weight_decay=False, **HYPER)

    def seconds(action: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(steps):
            action()
        return (time.perf_counter() - start) / steps

    times = [
        (seconds(lambda: run(mine, scalars)), seconds(optimizer.step)) for _ in range(runs + 1)
    ][1:]
    rates = [count / statistics.median(each) for each in zip(*times, strict=True)]
    return {
        "label": "measured (this machine, one thread, same run)",
        "parameters": count,
        "runs": runs,
        "kernel_params_per_s": rates[0],
        "torch_fused_params_per_s": rates[1],
        "kernel_over_torch": rates[0] / rates[1],
    }


def show(results: dict[str, Any]) -> None:
    """The tables."""
    table = Table("functional unit", "source", "DSP", "cycles", "LUT", "FF", "LUT memory", "units")
    table.add_row("AXDIMM", "paper", str(PAPER["dsp"]), str(PAPER["latency_cycles"]))
    for each in results["area"]:
        units = " ".join(f"{count} {op}" for op, count in each["units"].items())
        numbers = [str(each[key]) for key in ("dsp", "latency_cycles", "lut", "ff", "lut_memory")]
        table.add_row(f"order={each['order']}", "measured", *numbers, units)
    console.print(table)
    speed = Table("on one core of this machine", "params/s")
    for each in results["simulation"]:
        options = " ".join(f"{key}={value}" for key, value in each["options"].items())
        speed.add_row(
            f"{LANES} units in RTL {options or '(default)'}", f"{each['params_per_s']:,.0f}"
        )
    beside = results["kernel"]
    speed.add_row("C++ kernel", f"{beside['kernel_params_per_s']:,.0f}")
    speed.add_row("torch.optim.Adam(fused=True)", f"{beside['torch_fused_params_per_s']:,.0f}")
    console.print(speed)
    console.print(f"kernel over torch fused: {beside['kernel_over_torch']:.2f}")


def main(
    runs: Annotated[int, typer.Option(help="Runs of each timed job; the median counts.")] = 7,
    parameters: Annotated[int, typer.Option(help="Parameters of a simulated run.")] = 1 << 19,
    synth: Annotated[bool, typer.Option(help="Synthesise, which takes two minutes.")] = True,
) -> None:
    """Measure, print, and write build/bench/fu.json."""
    results = {
        "paper": PAPER,
        "area": [area(order) for order in ORDERS] if synth else [],
        "simulation": [
            simulation(runs, parameters),
            simulation(runs, parameters, delay="shift"),
            simulation(runs, parameters, register_inputs=True),
        ],
        "kernel": kernel_against_torch(runs),
    }
    show(results)
    console.print(f"written: {report.write('fu', results)}")


if __name__ == "__main__":
    typer.run(main)
