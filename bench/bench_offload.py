"""How far an offloaded model overlaps on the RTL of the two-channel DIMM, and without overlap.

A stack of equal layers is trained on `sim:axdimm`, with computation as long as on a V100 (AXDIMM's
machine). Batches are such that computation, or the channels, take longer, or both as long.
"""

from __future__ import annotations

from typing import Annotated, Any

import report
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nearstep.measure.overlap import Overlap, Stack
from nearstep.work.trace import picture, write_trace

DEVICE = "sim:axdimm?memory=ddr4-1600&channels=2"
CASES = [
    (12, 128, 2048, 5),
    (12, 128, 4096, 5),
    (12, 128, 8192, 5),
    (24, 128, 4096, 6),
    (24, 128, 6000, 6),
    (24, 128, 8192, 6),
    (12, 512, 8192, 5),
    (24, 512, 4096, 6),
    (24, 512, 6000, 6),
]
"""Layers, their width, rows of the input, and the budget in layers."""

console = Console()


def row(stack: Stack, found: Overlap) -> dict[str, Any]:
    phase, serial = found.overlapped.phase, found.serial.phase
    engine = found.overlapped.report
    assert engine is not None, "it was offloaded"
    return {
        "layers": stack.layers,
        "parameters": stack.layers * stack.width**2,
        "rows": stack.batch,
        "budget": engine.budget,
        "peak": engine.peak,
        "bits": found.bits,
        "cycles": phase.duration,
        "serial_cycles": serial.duration,
        "busy": dict(phase.busy),
        "serial_busy": dict(serial.busy),
        "ratio": found.ratio,
        "ratio_of_bounds": found.ratio_of_bounds,
        "gain": found.gain,
    }


def main(
    device: Annotated[str, typer.Option(help="of the optimizer")] = DEVICE,
    seed: Annotated[int, typer.Option(help="of parameters and input")] = 1,
) -> None:
    rows = []
    for layers, width, rows_of_input, room in track(CASES, "stacks", console=Console(stderr=True)):
        stack = Stack(
            device=device, layers=layers, width=width, batch=rows_of_input, room=room, seed=seed
        )
        found = Overlap.of(stack)
        if found.bits:
            raise AssertionError(f"{found.bits} bits differ: {stack}")
        rows.append(row(stack, found))
        if (layers, width, rows_of_input) == (12, 128, 4096):
            timeline = found.overlapped.timeline
            assert timeline is not None, "it was recorded"
            report.FOLDER.mkdir(parents=True, exist_ok=True)
            picture(timeline, report.FOLDER / "offload.png", f"{layers} layers on {device}")
            write_trace(timeline, report.FOLDER / "offload.trace.json")
    path = report.write(
        "offload",
        {
            "label": "transfers and updates: measured, RTL cycles; computation: modelled, V100",
            "device": device,
            "rows": rows,
        },
    )
    table = Table(
        "layers", "parameters", "rows", "cycles", "busy longest", "ratio", "of serial", "gain"
    )
    for each in rows:
        longest = max(each["busy"], key=each["busy"].get)
        table.add_row(
            str(each["layers"]),
            str(each["parameters"]),
            str(each["rows"]),
            str(each["cycles"]),
            f"{longest} {each['busy'][longest]}",
            f"{each['ratio']:.3f}",
            f"{each['ratio_of_bounds']:.3f}",
            f"{each['gain']:.2f}",
        )
    console.print(table)
    console.print(f"written to {path}")


if __name__ == "__main__":
    typer.run(main)
