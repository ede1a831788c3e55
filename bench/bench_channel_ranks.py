"""The Adam kernel on a DDR4-1600 channel of two ranks: data beats over all cycles, START to done.

As `bench_channel`, which has the same rows of one rank. Each rank is refreshed while the other
moves data. `settled` counts the refreshes due at done, of both ranks, one after the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import bench_channel
import typer
from bench_channel import BLOCKS_KIB, PAPER, Sweep, draw, runs
from harness import Bench

RANKS = 2
SWEEPS: Mapping[str, Sweep] = {
    "interleave": (
        "in one rank before the other, KiB",
        "{:,} KiB in a rank before the other",
        (4, 8, 16, 64, 256, 8 << 20),
    ),
    "bursts ahead": ("read bursts ahead", "read bursts ahead: {}", (8, 12, 16, 32, 64)),
    "block": ("block size, KiB", "blocks of {} KiB", BLOCKS_KIB),
    "skew": ("arrays apart, beats", "arrays {} beats apart", (0, 1, 16, 64, 128, 256, 272)),
    "part": ("part", "{}", ("4Gb x8", "8Gb x8", "16Gb x8", "32Gb x16", "8Gb x16")),
}

KERNEL, TRAFFIC = runs(SWEEPS, ranks=True)
BENCH = Bench(
    "channel_ranks",
    "## Two ranks on a channel",
    """
    The same controller with two ranks: one is refreshed while the other moves data. Columns
    as above; *settled* counts the refreshes due at done, of both ranks, one after the other,
    and *turnaround* the changes of direction and of rank. The kernel's RTL, 16 KiB blocks,
    {rows[0][parameters]:,} parameters:
    """,
    KERNEL,
    """
    The C++ model of its traffic, {swept:,} parameters; 8Gb x8, 16 KiB in a
    rank before the other, 16 KiB blocks, 16 units, where nothing else is said:
    """,
    TRAFFIC,
    "![Where the cycles of two ranks go](channel_ranks.png)",
    derived=lambda results: {"swept": results["rows"][-1]["parameters"]},
)


def main(
    count: Annotated[int, typer.Option(help="Parameters of a step.")] = 1_000_000,
    sweep: Annotated[
        int, typer.Option(help="Parameters of a step of the traffic model.")
    ] = 250_000,
) -> None:
    """Measure, print, and write build/bench/channel_ranks.json and channel_ranks.png."""
    rows = bench_channel.kernel_rows(count, ranks=RANKS)
    rows += bench_channel.traffic_rows(SWEEPS, sweep, ranks=RANKS)
    title = "Adam's traffic on a DDR4-1600 channel of two ranks: 8Gb x8, 16 KiB otherwise"
    draw(rows, SWEEPS, title, "channel_ranks.png")
    BENCH.report(paper=PAPER, rows=rows)


if __name__ == "__main__":
    typer.run(main)
