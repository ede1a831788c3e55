"""The Adam kernel: cycles against the bound of its memory, and speed of devices on this machine.

Cycles are those of the RTL, counted by the kernel itself, with 16 lanes. The bound of `ideal` is
4 read beats for 16 parameters, as reads and writes go at the same time; of `halfduplex` 7 beats.
"""

from __future__ import annotations

import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import report
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep.buffer import Buffer

LANES = 16
BOUND_BEATS = {"ideal": 4, "halfduplex": 7}
COUNTS = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
RTL_LIMIT = 1_000_000
"""Largest count for which the cycles of the native units are checked against those of the RTL."""

HYPER = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
TORCH_COUNT = 1 << 22
COCOTB_COUNT = 50_000
COCOTB_BENCH = Path(__file__).resolve().parents[1] / "tests" / "system" / "cocotb_driver.py"

console = Console(width=150)


def arrays(count: int) -> dict[str, np.ndarray]:
    """Parameters, gradients and moments as in training."""
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal(count, np.float32) for name in "pgmv"}
    made["v"] = np.square(made["v"])
    return made


def load(device: AxdimmDevice, host: dict[str, np.ndarray]) -> dict[str, Buffer]:
    """Buffers on the device with the contents of `host`."""
    buffers = {name: device.alloc(array.size) for name, array in host.items()}
    for name, array in host.items():
        buffers[name].write(array)
    return buffers


def cycles(url: str, counts: Sequence[int], size: int) -> list[int]:
    """Device cycles of one step of each of `counts` elements, in arrays of `size` elements."""
    with nearstep.open(url) as device:
        buffers = load(device, arrays(size))
        return [
            device.update("adam", {n: b[0:count] for n, b in buffers.items()}, step=1, **HYPER)
            .wait()
            .cycles
            for count in track(counts, url, console=console)
        ]


def fit(memory: str, counts: Sequence[int]) -> dict[str, Any]:
    """cycles = a + b * parameters, and fractions of the bound."""
    base = f"sim:axdimm?lanes={LANES}&memory={memory}"
    measured = cycles(f"{base}&fu=native", counts, max(counts))
    checked = [count for count in counts if count <= RTL_LIMIT]
    if cycles(f"{base}&fu=rtl", checked, max(counts)) != measured[: len(checked)]:
        raise SystemExit("cycles of the native units are not those of the RTL")
    slope, offset = np.polyfit(counts, measured, 1)
    bound = BOUND_BEATS[memory] / LANES
    return {
        "url": f"{base}&fu=native",
        "label": "measured (RTL cycles; units native, cycles equal to fu=rtl up to 1e6)",
        "counts": list(counts),
        "cycles": measured,
        "a_cycles": float(offset),
        "b_cycles_per_parameter": float(slope),
        "bound_cycles_per_parameter": bound,
        "bound_over_b": bound / float(slope),
        "fraction_of_bound": [
            bound * count / each for count, each in zip(counts, measured, strict=True)
        ],
    }


def median_seconds(action: Callable[[], object], runs: int) -> tuple[float, float]:
    """Median wall and CPU time of an action of one thread, after one that does not count."""
    action()
    wall, cpu = [], []
    for _ in range(runs):
        start = time.perf_counter(), time.process_time()
        action()
        wall.append(time.perf_counter() - start[0])
        cpu.append(time.process_time() - start[1])
    return statistics.median(wall), statistics.median(cpu)


def simulation_speed(fidelity: str, count: int, runs: int) -> dict[str, Any]:
    """Parameters simulated in a second of one core."""
    url = f"sim:axdimm?lanes={LANES}&memory=ideal&fu={fidelity}"
    with nearstep.open(url) as device:
        buffers = load(device, arrays(count))
        wall, cpu = median_seconds(
            lambda: device.update("adam", buffers, step=1, **HYPER).wait(), runs
        )
    return {
        "url": url,
        "label": "measured (this machine, one core)",
        "parameters": count,
        "runs": runs,
        "params_per_s": count / wall,
        "params_per_cpu_s": count / cpu,
    }


def dimm_speed(option: str, count: int, runs: int) -> dict[str, Any]:
    """The same of a DIMM of two DDR4 channels: both to acceleration mode, a run on each, and back.

    Copies to and from the DIMM are not in it.
    """
    url = f"sim:axdimm?memory=ddr4-1600&channels=2&{option}"
    with nearstep.open(url) as device:
        share = count // len(device.channels)
        host = arrays(share)
        parts = [
            {
                name: device.alloc(share, channel=channel.number, align=device.stripe_align)
                for name in host
            }
            for channel in device.channels
        ]
        for part in parts:
            for name, array in host.items():
                part[name].write(array)
        cycles = []

        def step() -> None:
            with device.acceleration():
                started = [device.update("adam", part, step=1, **HYPER) for part in parts]
                cycles.append(max(run.wait().cycles for run in started))

        wall, cpu = median_seconds(step, runs)
    return {
        "url": url,
        "label": "measured (this machine, one core; mode changes included, copies not)",
        "parameters": count,
        "runs": runs,
        "cycles": max(cycles),
        "fraction_of_peak": BOUND_BEATS["halfduplex"] * -(-share // LANES) / max(cycles),
        "params_per_s": count / wall,
        "params_per_cpu_s": count / cpu,
    }


def cocotb_speed() -> dict[str, Any]:
    """The same job on the same RTL under cocotb, with the memory of cocotbext-axi."""
    from nearstep_hw.generate import verilog
    from nearstep_sim.bench.cocotb_runner import run_cocotb
    from nearstep_sim.verilate.build import verilog_of

    options = {"lanes": LANES}  # as `nearstep rtl` has it
    result = run_cocotb(
        top="adam_kernel",
        verilog=verilog_of("generator adam_kernel", lambda: verilog("adam_kernel")),
        test_module=COCOTB_BENCH,
        testcase="two_steps_give_the_bits_of_the_golden_rule",
        env={"NEARSTEP_CONFIG": json.dumps(options), "NEARSTEP_COUNT": str(COCOTB_COUNT)},
    )
    rates = re.findall(r"params_per_s (\d+)", result.log.read_text())
    return {
        "url": f"cocotb, AxiRam, lanes={LANES}",
        "label": "measured (this machine, one core)",
        "parameters": COCOTB_COUNT,
        "runs": len(rates),
        "params_per_s": statistics.median(map(float, rates)),
    }


def golden_against_torch(runs: int) -> dict[str, Any]:
    """`golden:axdimm` and `torch.optim.Adam(fused=True)` in turn, one thread."""
    import torch

    torch.set_num_threads(1)
    host = arrays(TORCH_COUNT)
    parameter = torch.nn.Parameter(torch.from_numpy(host["p"].copy()))
    parameter.grad = torch.from_numpy(host["g"].copy())
    optimizer = torch.optim.Adam([parameter], fused=True, **HYPER)
    url = "golden:axdimm?engine=cpp"
    seconds: dict[str, list[float]] = {"torch": [], "golden": []}
    with nearstep.open(url) as device:
        buffers = load(device, host)
        for run in range(runs + 2):
            start = time.perf_counter()
            optimizer.step()
            middle = time.perf_counter()
            device.update("adam", buffers, step=run + 1, **HYPER).wait()
            end = time.perf_counter()
            if run >= 2:
                seconds["torch"].append(middle - start)
                seconds["golden"].append(end - middle)
    rates = {name: TORCH_COUNT / statistics.median(times) for name, times in seconds.items()}
    return {
        "url": url,
        "label": "measured (this machine, one thread, same run)",
        "parameters": TORCH_COUNT,
        "runs": runs,
        "golden_params_per_s": rates["golden"],
        "torch_fused_params_per_s": rates["torch"],
        "golden_over_torch": rates["golden"] / rates["torch"],
    }


def plot(fits: dict[str, dict[str, Any]]) -> None:
    """Fraction of the bound over the number of parameters."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for memory, each in fits.items():
        axes.semilogx(each["counts"], each["fraction_of_bound"], marker="o", label=memory)
    axes.set_xlabel("parameters")
    axes.set_ylabel("fraction of the memory's bound")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(report.FOLDER / "kernel.png", dpi=150)


def show(results: dict[str, Any]) -> None:
    """The tables."""
    table = Table(
        "memory", "a (cycles)", "b (cycles/param)", "bound", "bound/b", "at 1e6, of bound"
    )
    for memory, each in results["fits"].items():
        at_million = dict(zip(each["counts"], each["fraction_of_bound"], strict=True))
        table.add_row(
            memory,
            f"{each['a_cycles']:.0f}",
            f"{each['b_cycles_per_parameter']:.5f}",
            f"{each['bound_cycles_per_parameter']:.4f}",
            f"{each['bound_over_b']:.4f}",
            f"{at_million.get(1_000_000, float('nan')):.4f}",
        )
    console.print(table)
    speed = Table("device", "params/s, one core, wall", "params/s, one core, CPU time")
    for each in results["simulation"]:
        cpu = each.get("params_per_cpu_s")
        wall = f"{each['params_per_s']:,.0f}"
        speed.add_row(each["url"], wall, "" if cpu is None else f"{cpu:,.0f}")
    golden = results["golden"]
    for name, url in (("golden", golden["url"]), ("torch_fused", "torch.optim.Adam(fused=True)")):
        speed.add_row(url, f"{golden[f'{name}_params_per_s']:,.0f}")
    console.print(speed)
    console.print(f"golden over torch fused: {golden['golden_over_torch']:.2f}")


def main(
    largest: Annotated[int, typer.Option(help="Largest count of the fits.")] = COUNTS[-1],
    runs: Annotated[int, typer.Option(help="Runs of each timed job; the median counts.")] = 5,
    cocotb: Annotated[bool, typer.Option(help="Run the job under cocotb as well.")] = True,
) -> None:
    """Measure, print, and write build/bench/kernel.json and kernel.png."""
    counts = [count for count in COUNTS if count <= largest]
    fits = {memory: fit(memory, counts) for memory in BOUND_BEATS}
    results = {
        "fits": fits,
        "simulation": [
            simulation_speed("rtl", 1_000_000, runs),
            simulation_speed("native", 4_000_000, runs),
            dimm_speed("fu=rtl", 2_000_000, runs),
            dimm_speed("top=whole", 2_000_000, runs),
            dimm_speed("fu=native", 2_000_000, runs),
            *([cocotb_speed()] if cocotb else []),
        ],
        "golden": golden_against_torch(max(runs, 9)),
    }
    show(results)
    path = report.write("kernel", results)
    plot(fits)
    console.print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
