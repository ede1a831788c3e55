"""Cycles of AdamW on a DDR4-1600 channel by the formats in memory: binary32, bfloat16, and moments
in 8 bits."""

from __future__ import annotations

from typing import Annotated, Any

import report
import typer
from rich.console import Console
from rich.table import Table

import nearstep
from nearstep.axdimm.device import SKEW_BEATS
from nearstep.updater.device import KernelDevice
from nearstep.updater.formats import DTYPES
from nearstep_spec.blockwise import SIGNED
from nearstep_spec.dram.geometry import BEAT_BYTES
from nearstep_spec.updater.operands import array_bytes, operands

DEVICE = "sim:axdimm?memory=ddr4-1600&fu=native&gradient_formats=fp32,bf16"
MOMENTS = "state_format=bf16"
ALL = f"{MOMENTS}&parameter_format=bf16"
EIGHT_BIT = "state_format=dynamic8"
STOCHASTIC = "stochastic_rounding=yes"
KINDS = {
    "p, g, m, v fp32": ("", "fp32"),
    "m, v bf16": (MOMENTS, "fp32"),
    "m, v bf16, stochastic": (f"{MOMENTS}&{STOCHASTIC}", "fp32"),
    "g, m, v bf16": (MOMENTS, "bf16"),
    "g, m, v bf16, stochastic": (f"{MOMENTS}&{STOCHASTIC}", "bf16"),
    "p, g, m, v bf16": (ALL, "bf16"),
    "p, g, m, v bf16, stochastic": (f"{ALL}&{STOCHASTIC}", "bf16"),
    "m, v 8 bits": (EIGHT_BIT, "fp32"),
    "g bf16, m, v 8 bits": (EIGHT_BIT, "bf16"),
    "p, g bf16, m, v 8 bits": (f"{EIGHT_BIT}&parameter_format=bf16", "bf16"),
    "m, v 8 bits, 4 units": (f"{EIGHT_BIT}&functional_units=4", "fp32"),
}
"""Options of the kernel and format of the gradients, by what is in which format."""

NEAR = {
    "m, v 8 bits": "m, v bf16",
    "g bf16, m, v 8 bits": "g, m, v bf16",
    "p, g bf16, m, v 8 bits": "p, g, m, v bf16",
}
"""Moments in 8 bits, and bfloat16 in their place."""

BANKS = 16
"""Of a rank of x8 parts: arrays begin in the same one, as they are placed on a DIMM."""

CLOCK_HZ = 200_000_000

console = Console()


def measure(kind: str, count: int) -> dict[str, Any]:
    """One step from START to done, refresh on; what it moves is what it needs, once."""
    options, gradient = KINDS[kind]
    rounding = nearstep.Rounding(seed=1) if STOCHASTIC in options else None
    with nearstep.open("&".join(filter(None, (DEVICE, options))), KernelDevice) as device:
        formats = {n: gradient if n == "g" else each.format
                   for n, each in operands(device.config).items()}  # fmt: skip
        nbytes = {n: array_bytes(device.config, form, count) for n, form in formats.items()}
        coded = [n for n, form in formats.items() if form in SIGNED]
        skews = {n: (1 + k) * SKEW_BEATS * BEAT_BYTES for k, n in enumerate(coded)}
        buffers = {n: device.alloc(nbytes[n] // DTYPES[form].itemsize, DTYPES[form],
                                   align=BANKS * BEAT_BYTES, offset=skews.get(n, 0))
                   for n, form in formats.items()}  # fmt: skip
        for buffer in buffers.values():
            buffer.fill(0)
        with device.acceleration():
            run = device.update(
                "adamw", buffers, step=1, gradient_format=gradient, rounding=rounding
            ).wait()
        passes = {n: bool(each.read) + bool(each.write)
                  for n, each in operands(device.config).items()}  # fmt: skip
        moved = sum(passes[n] * nbytes[n] for n in formats)
        beats = run.counters["read_beats"] + run.counters["write_beats"]
        assert run.cycles is not None
        return {
            "formats": kind,
            "device": device.url,
            "bytes_per_parameter": moved / count,
            "cycles": run.cycles,
            "beats": beats,
            "fraction_of_peak": moved / (device.config.beat_bytes * run.cycles),
            "params_per_s": count * CLOCK_HZ / run.cycles,
        }


def main(count: Annotated[int, typer.Option(help="Parameters.")] = 1_000_000) -> None:
    """Measure, print, and write build/bench/formats.json."""
    rows = [measure(kind, count) for kind in KINDS]
    base, by_kind = rows[0], {row["formats"]: row for row in rows}
    for kind, near in NEAR.items():
        by_kind[kind]["than_bf16"] = by_kind[near]["cycles"] / by_kind[kind]["cycles"]
    for row in rows:
        row["faster"] = base["cycles"] / row["cycles"]
        row["fewer_bytes"] = base["bytes_per_parameter"] / row["bytes_per_parameter"]
    path = report.write("formats", {"label": "measured (RTL cycles)", "count": count, "rows": rows})
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
