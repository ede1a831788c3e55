"""The Adam kernel on a DDR4-1600 channel of two ranks: data beats over all cycles, START to done.

As `bench_channel`, which has the same rows of one rank.
"""

from collections.abc import Mapping
from typing import Annotated

from bench_channel import BLOCKS_KIB, Sweep, draw, kernel_rows, traffic_rows
from harness import option, report, script

RANKS = 2
INTERLEAVES_KIB = (4, 8, 16, 64, 256, 8 << 20)
RANK = "in one rank before the other, KiB"
SWEEPS: Mapping[str, Sweep] = {
    "interleave": (RANK, "{:,} KiB in a rank before the other", INTERLEAVES_KIB),
    "bursts ahead": ("read bursts ahead", "read bursts ahead: {}", (8, 12, 16, 32, 64)),
    "block": ("block size, KiB", "blocks of {} KiB", BLOCKS_KIB),
    "skew": ("arrays apart, beats", "arrays {} beats apart", (0, 1, 16, 64, 128, 256, 272)),
    "part": ("part", "{}", ("4Gb x8", "8Gb x8", "16Gb x8", "32Gb x16", "8Gb x16")),
}


@script
def main(
    count: Annotated[int, option("Parameters of a step.")] = 1_000_000,
    sweep: Annotated[int, option("Parameters of a step of the traffic model.")] = 250_000,
) -> None:
    """Measure, print, and write build/bench/channel_ranks.json and channel_ranks.png."""
    kernel, rows = kernel_rows(count, ranks=RANKS), traffic_rows(SWEEPS, sweep, ranks=RANKS)
    title = "Adam's traffic on a DDR4-1600 channel of two ranks: 8Gb x8, 16 KiB otherwise"
    draw(rows, SWEEPS, title, "channel_ranks.png")
    report("channel_ranks", kernel=kernel, traffic=rows)
