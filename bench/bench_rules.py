# amaranth: UnusedElaboratable=no
"""Update rules beside one another in one kernel: cycles against the beats they need, and area.

Cycles are those of the RTL with functional units in C++ (whose cycles are those of the units in
RTL). The bound is a beat a cycle, of the arrays that the rule reads and writes. Area is that of
`synth_xilinx -family xcup` for one functional unit.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Annotated, Any

import numpy as np
import report
import typer
from needed import update_bytes
from rich.console import Console
from rich.progress import track
from rich.table import Table

import nearstep
from nearstep.axdimm.device import AxdimmDevice
from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.verilog import to_verilog
from nearstep_sim.synthesis import ultrascale_plus_area, ultrascale_plus_cells
from nearstep_spec.rule.rule import Rule
from nearstep_spec.rule.rules import RuleSet

RULES = ("adam", "sgd", "sgd_momentum", "adagrad")
ALL = ",".join(RULES)
MEMORIES = {
    "halfduplex": f"sim:axdimm?memory=halfduplex&fu=native&rules={ALL}",
    "ddr4-1600": f"sim:axdimm?memory=ddr4-1600&channels=1&fu=native&rules={ALL}",
}
CLOCK_HZ = 200_000_000
PAPER_BYTES_PER_S = 7e9
"""Updater of Smart-Infinity. Ref: section VII-A."""

console = Console()


def arguments(rule: str) -> tuple[str, str, dict[str, Any]]:
    """Method, arrays and hyper-parameters of a step."""
    return {
        "adam": ("adam", "pgmv", {"step": 2, "weight_decay": 0.01, "decoupled": True}),
        "sgd": ("sgd", "pg", {"lr": 0.1, "weight_decay": 0.01}),
        "sgd_momentum": ("sgd", "pgm", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        "adagrad": ("adagrad", "pgv", {"step": 2}),
    }[rule]


def measure(device: AxdimmDevice, memory: str, rule: str, count: int) -> dict[str, Any]:
    """Cycles of one step, by the kernel's own counter."""
    method, arrays, hyper = arguments(rule)
    rng = np.random.default_rng(1)
    buffers = {name: device.alloc(count, align=1024) for name in arrays}
    for name, buffer in buffers.items():
        values = rng.standard_normal(count, np.float32)
        buffer.write(np.square(values) if name == "v" else values)
    with device.acceleration() if device.dimm is not None else nullcontext():
        run = getattr(device, method)(**buffers, **hyper).wait()
    for buffer in buffers.values():
        buffer.free()
    beats = run.counters["read_beats"] + run.counters["write_beats"]
    per_s = count / run.cycles * CLOCK_HZ
    needed = update_bytes(device.config, rule, count)
    return {
        "label": "measured (RTL cycles)",
        "memory": memory,
        "rule": rule,
        "parameters": count,
        "cycles": run.cycles,
        "beats": beats,
        "of_bound": needed / device.config.beat_bytes / run.cycles,
        "params_per_s_at_200_mhz": per_s,
        "bytes_per_s_at_200_mhz": needed / run.cycles * CLOCK_HZ,
    }


def area(name: str, rule: Rule) -> dict[str, Any]:
    """Units, latency and cells of one functional unit."""
    unit = FunctionalUnit(rule)
    cells = ultrascale_plus_cells(to_verilog(unit, "unit"), "unit")
    return {
        "label": "measured (synth_xilinx -family xcup; no place and route)",
        "name": name,
        "units": dict(rule.program.units()),
        "latency": unit.latency,
        **ultrascale_plus_area(cells),
    }


def show(results: dict[str, Any]) -> None:
    table = Table("memory", "rule", "cycles", "% of bound", "MP/s", "GB/s")
    for row in results["runs"]:
        table.add_row(
            row["memory"],
            row["rule"],
            f"{row['cycles']:,}",
            f"{100 * row['of_bound']:.2f}",
            f"{row['params_per_s_at_200_mhz'] / 1e6:.1f}",
            f"{row['bytes_per_s_at_200_mhz'] / 1e9:.2f}",
        )
    console.print(table)
    table = Table("functional unit", "units", "latency", "DSP", "LUT", "FF")
    for row in results["area"]:
        table.add_row(
            row["name"],
            str(sum(row["units"].values())),
            str(row["latency"]),
            *(f"{row[key]:.0f}" for key in ("dsp", "lut", "ff")),
        )
    console.print(table)


def main(
    count: Annotated[int, typer.Option(min=1, help="Parameters of a step.")] = 1_000_000,
) -> None:
    """Measure every rule, and write build/bench/rules.json."""
    runs = []
    for memory, url in MEMORIES.items():
        with nearstep.open(url) as device:
            for rule in track(RULES, f"rules on {memory}", console=console):
                runs.append(measure(device, memory, rule, count))
    whole = RuleSet(RULES, "default")
    shapes = [*zip(RULES, whole.rules, strict=True), ("all four, shared", whole.whole)]
    cells = [area(name, rule) for name, rule in track(shapes, "area", console=console)]
    results = {"paper_bytes_per_s": PAPER_BYTES_PER_S, "runs": runs, "area": cells}
    show(results)
    console.print(f"written: {report.write('rules', results)}")


if __name__ == "__main__":
    typer.run(main)
