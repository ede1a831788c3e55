# amaranth: UnusedElaboratable=no
"""Area of a SmartSSD card's updater with and without Top-K: `synth_xilinx -family xcup`."""

from __future__ import annotations

from typing import Any

import report
import typer
from rich.console import Console
from rich.progress import track

from nearstep_hw.rule.rtl import FunctionalUnit
from nearstep_hw.updater.pairs.load import PairLoad
from nearstep_hw.updater.update_kernel import UpdateKernel
from nearstep_hw.verilog import to_verilog
from nearstep_sim.synthesis import ultrascale_plus_area, ultrascale_plus_cells
from nearstep_spec.updater.config import UpdateKernelConfig
from nearstep_spec.updater.registers import update_rule

CHIP = {"lut": 522_720, "bram36": 984, "uram": 128, "dsp": 1968}
"""KU15P (DS922); Table III rounds the LUTs to 522 K."""
PAPER_SHARE = {
    "updater": {"lut": 0.3366, "bram36": 0.2713, "uram": 0.3438, "dsp": 0.1103},
    "with Top-K": {"lut": 0.3412, "bram36": 0.2713, "uram": 0.3594, "dsp": 0.1103},
}
"""Ref: Smart-Infinity, Table III."""

console = Console()


def area() -> list[dict[str, Any]]:
    """Resources of Adam's updater, with 16 and with 4 units, without and with Top-K."""
    plain = UpdateKernelConfig(windows=8)
    parts = {
        "shell": (lambda: UpdateKernel(plain, unit=None), "shell"),
        "unit": (lambda: FunctionalUnit(update_rule(plain)), "unit"),
        "fused": (lambda: PairLoad(UpdateKernelConfig(windows=8, compression=("fused",))), "pairs"),
        "scatter": (
            lambda: PairLoad(UpdateKernelConfig(windows=8, compression=("scatter",))),
            "pairs",
        ),
    }
    cells = {}
    for name, (make, top) in track(parts.items(), "area", console=console):
        cells[name] = ultrascale_plus_area(ultrascale_plus_cells(to_verilog(make(), top), top))
    rows = []
    for units in (16, 4):
        for form in (None, "fused", "scatter"):
            sums = {
                key: cells["shell"][key]
                + units * cells["unit"][key]
                + (cells[form][key] if form else 0)
                for key in cells["shell"]
            }
            sums["lut"] += sums["lut_memory"]
            rows.append(
                {
                    "label": "measured (synth_xilinx -family xcup, parts added)",
                    "units": units,
                    "top_k": form,
                    **sums,
                    "of_chip": {key: sums[key] / CHIP[key] for key in ("lut", "bram36", "dsp")},
                }
            )
    return rows


def main() -> None:
    """Count cells (takes some minutes), and write build/bench/smartssd_area.json."""
    rows = area()
    for row in rows:
        console.print(f"{row['units']} units, {row['top_k']}: {row['of_chip']}")
    results = {"paper_share": PAPER_SHARE, "area": rows}
    console.print(f"written: {report.write('smartssd_area', results)}")


if __name__ == "__main__":
    typer.run(main)
