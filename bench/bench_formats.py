"""Cycles of AdamW on a DDR4-1600 channel by the formats in memory: binary32 and bfloat16."""

from __future__ import annotations

from typing import Annotated, Any

import report
import typer
from rich.console import Console
from rich.table import Table

import nearstep
from nearstep.updater.device import KernelDevice
from nearstep.updater.formats import DTYPES
from nearstep_spec.updater.operands import element_bytes, operands

DEVICE = "sim:axdimm?memory=ddr4-1600&fu=native&gradient_formats=fp32,bf16"
MOMENTS = "state_format=bf16"
ALL = f"{MOMENTS}&parameter_format=bf16"
STOCHASTIC = "stochastic_rounding=yes"
KINDS = {
    "p, g, m, v fp32": ("", "fp32"),
    "m, v bf16": (MOMENTS, "fp32"),
    "m, v bf16, stochastic": (f"{MOMENTS}&{STOCHASTIC}", "fp32"),
    "g, m, v bf16": (MOMENTS, "bf16"),
    "g, m, v bf16, stochastic": (f"{MOMENTS}&{STOCHASTIC}", "bf16"),
    "p, g, m, v bf16": (ALL, "bf16"),
    "p, g, m, v bf16, stochastic": (f"{ALL}&{STOCHASTIC}", "bf16"),
}
"""Options of the kernel and format of the gradients, by what is in which format."""

EIGHT_BIT = (
    ("m, v 8 bits (modelled)", "m, v bf16"),
    ("g bf16, m, v 8 bits (modelled)", "g, m, v bf16"),
    ("p, g bf16, m, v 8 bits (modelled)", "p, g, m, v bf16"),
)
"""What would be with moments in 8 bits, and what it is with bfloat16 in their place."""

BLOCK = 256
"""Elements of a scale, which is binary32, of moments in 8 bits."""

CLOCK_HZ = 200_000_000

console = Console()


def measure(kind: str, count: int) -> dict[str, Any]:
    """One step from START to done, refresh on; what it moves is what it needs, once."""
    options, gradient = KINDS[kind]
    rounding = nearstep.Rounding(seed=1) if STOCHASTIC in options else None
    with nearstep.open("&".join(filter(None, (DEVICE, options))), KernelDevice) as device:
        formats = {n: gradient if n == "g" else each.format
                   for n, each in operands(device.config).items()}  # fmt: skip
        buffers = {n: device.alloc(count, DTYPES[form]) for n, form in formats.items()}
        for buffer in buffers.values():
            buffer.fill(0)
        with device.acceleration():
            run = device.update(
                "adamw", buffers, step=1, gradient_format=gradient, rounding=rounding
            ).wait()
        passes = {n: bool(each.read) + bool(each.write)
                  for n, each in operands(device.config).items()}  # fmt: skip
        moved = sum(passes[n] * element_bytes(form) for n, form in formats.items())
        beats = run.counters["read_beats"] + run.counters["write_beats"]
        assert run.cycles is not None
        return {
            "formats": kind,
            "device": device.url,
            "bytes_per_parameter": moved,
            "cycles": run.cycles,
            "beats": beats,
            "fraction_of_peak": moved * count / (device.config.beat_bytes * run.cycles),
            "params_per_s": count * CLOCK_HZ / run.cycles,
        }


def eight_bit(rows: list[dict[str, Any]], kind: str, like: str) -> dict[str, Any]:
    """A row of a kernel that there is not: cycles go down with the bytes as they do from fp32 to
    bfloat16 moments."""
    by_kind = {row["formats"]: row for row in rows}
    wide, near = by_kind["p, g, m, v fp32"], by_kind["m, v bf16"]
    a_byte = (wide["cycles"] - near["cycles"]) / (
        wide["bytes_per_parameter"] - near["bytes_per_parameter"]
    )
    row, fewer = by_kind[like], 4 * (1 - 4 / BLOCK)  # each moment is read and written
    cycles = round(row["cycles"] - fewer * a_byte)
    moved = row["bytes_per_parameter"] - fewer
    peak = row["fraction_of_peak"] * moved / row["bytes_per_parameter"] * row["cycles"] / cycles
    return {
        "formats": kind,
        "bytes_per_parameter": moved,
        "cycles": cycles,
        "fraction_of_peak": peak,
        "params_per_s": row["params_per_s"] * row["cycles"] / cycles,
        "than_bf16": row["cycles"] / cycles,
    }


def main(count: Annotated[int, typer.Option(help="Parameters.")] = 1_000_000) -> None:
    """Measure, print, and write build/bench/formats.json."""
    rows = [measure(kind, count) for kind in KINDS]
    rows += [eight_bit(rows, *each) for each in EIGHT_BIT]
    base = rows[0]
    for row in rows:
        row["faster"] = base["cycles"] / row["cycles"]
        row["fewer_bytes"] = base["bytes_per_parameter"] / row["bytes_per_parameter"]
    path = report.write(
        "formats", {"label": "measured (RTL cycles); 8 bits modelled", "count": count, "rows": rows}
    )
    table = Table(
        "in memory", "bytes a parameter", "cycles", "million/s at 200 MHz", "of DRAM peak",
        "times as fast", "ratio of bytes", title=f"{count:,} parameters, one channel; {path}",
    )  # fmt: skip
    for row in rows:
        table.add_row(
            row["formats"], f"{row['bytes_per_parameter']:g}", f"{row['cycles']:,}",
            f"{row['params_per_s'] / 1e6:.1f}", f"{row['fraction_of_peak']:.2%}",
            f"{row['faster']:.3f}", f"{row['fewer_bytes']:.3f}",
        )  # fmt: skip
    console.print(table)


if __name__ == "__main__":
    typer.run(main)
