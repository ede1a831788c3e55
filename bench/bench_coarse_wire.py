"""COARSE: what limits a sum whose elements have 16 bits on the links; the ALUs at full rate.

For each chunk a core does 2 N - 1 steps and sends 2 N - 2 entries. With 16 bits, an entry of 128
phits takes 128 cycles of 8 ALUs, and the local DRAM moves twice as many bytes for each phit as with
32 bits. Runs with more ALUs and with a memory that reads and writes at the same time tell the two
apart.
"""

from __future__ import annotations

from typing import Any

import report
import typer
from bench_coarse import URL, reduction
from rich.console import Console
from rich.progress import track

NBYTES = 4 << 20
DEVICES = 4
RUNS = (
    ("fp32", 8, "halfduplex"),
    ("fp16", 8, "halfduplex"),
    ("fp16", 8, "ideal"),
    ("fp16", 16, "halfduplex"),
    ("fp16", 16, "ideal"),
)

console = Console()


def bounds(wire: str, alus: int) -> dict[str, float]:
    """Cycles for each of the three, if the others were free."""
    elements = NBYTES / 4 / 2  # of each ring
    per_entry = 2048 if wire == "fp32" else 4096  # bytes in memory of an entry of 128 phits
    entries = elements * 4 / per_entry  # of one step of all chunks, of all parts
    chunks = entries / DEVICES
    beats = per_entry // (4 * alus)
    return {
        "links": chunks * (2 * DEVICES - 2) * 130,
        "alus": chunks * (2 * DEVICES - 1) * beats,
        "dram": 2 * NBYTES / 64,
    }


def main() -> None:
    """Measure a pool of 4 devices, and write build/bench/coarse_wire.json."""
    rows: list[dict[str, Any]] = []
    for wire, alus, memory in track(RUNS, "wires", console=console):
        url = f"{URL}{DEVICES}&memory={memory}&alus={alus}"
        row = reduction(url, NBYTES, wire=wire)
        rows.append({**row, "alus": alus, "memory": memory, "bounds": bounds(wire, alus)})
        console.print(
            f"{wire}, {alus} ALUs, {memory}: {row['cycles']:,} cycles, "
            f"{row['beats_per_cycle']:.3f} beats a cycle, {row['elements_differ']} bits differ"
        )
    console.print(f"written: {report.write('coarse_wire', {'rows': rows})}")


if __name__ == "__main__":
    typer.run(main)
