"""The Adam kernel on a DDR4-1600 channel of two ranks: data beats over all cycles, START to done.

As `bench_channel`, which has the same rows of one rank. Each rank is refreshed while the other
moves data. `settled` counts the refreshes due at done, of both ranks, one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import bench_channel
import report
import typer
from bench_channel import BLOCKS_KIB, PAPER
from rich.progress import track
from rich.table import Table

from nearstep_sim.models.dram.bench import (
    BURSTS_AHEAD,
    Channel,
    ChannelRun,
    bases_of,
    run_kernel,
    run_traffic,
)
from nearstep_spec.dram.geometry import BEAT_BYTES

RANKS = 2
KERNEL_PARTS = (("8Gb", "x8"), ("16Gb", "x8"), ("32Gb", "x16"))
UNITS = (16, 4)
INTERLEAVES_KIB = (4, 8, 16, 64, 256, 8 << 20)
AHEAD = (8, 12, 16, 32, 64)
SKEW_BEATS = (0, 1, 16, 64, 128, 256, 272)
PARTS = (("4Gb", "x8"), ("8Gb", "x8"), ("16Gb", "x8"), ("32Gb", "x16"), ("8Gb", "x16"))

console = bench_channel.console


def row(kind: str, run: ChannelRun, **shape: Any) -> dict[str, Any]:
    """One measurement as plain data."""
    return {
        "bursts_ahead": BURSTS_AHEAD,
        **bench_channel.row(kind, run, **shape),
        "refreshes_due_at_done": list(run.debts),
    }


def kernel_rows(count: int) -> list[dict[str, Any]]:
    shapes = [
        (Channel(density=density, width=width, ranks=RANKS), units)
        for density, width in KERNEL_PARTS
        for units in UNITS
    ]
    return [
        row(
            "kernel",
            run_kernel(channel, count=count, functional_units=units),
            functional_units=units,
        )
        for channel, units in track(shapes, "kernel RTL", console=console)
    ]


def traffic_rows(count: int) -> list[dict[str, Any]]:
    channel = Channel(ranks=RANKS)

    def run(sweep: str, on: Channel = channel, **options: Any) -> dict[str, Any]:
        shape = {name: value for name, value in options.items() if name == "bursts_ahead"}
        return row("traffic", run_traffic(on, count=count, **options), sweep=sweep, **shape)

    rows = [
        run("interleave", Channel(ranks=RANKS, interleave=kib << 10))
        for kib in track(INTERLEAVES_KIB, "interleaving", console=console)
    ]
    rows += [
        run("bursts ahead", bursts_ahead=bursts)
        for bursts in track(AHEAD, "bursts ahead", console=console)
    ]
    rows += [
        {**run("block", block_bytes=kib << 10), "block_kib": kib}
        for kib in track(BLOCKS_KIB, "block sizes", console=console)
    ]
    rows += [
        {**run("skew", bases=bases_of(channel, count, skew * BEAT_BYTES)), "skew_beats": skew}
        for skew in track(SKEW_BEATS, "places of the arrays", console=console)
    ]
    rows += [
        run("part", Channel(density=density, width=width, ranks=RANKS))
        for density, width in track(PARTS, "parts", console=console)
    ]
    return rows


NAMES: dict[str, Callable[[dict[str, Any]], str]] = {
    "interleave": lambda each: f"{each['interleave'] >> 10}",
    "bursts ahead": lambda each: f"{each['bursts_ahead']}",
    "block": lambda each: f"{each['block_kib']}",
    "skew": lambda each: f"{each['skew_beats']}",
    "part": lambda each: f"{each['density']} {each['width']}",
}
TITLES = {
    "interleave": "in one rank before the other, KiB",
    "bursts ahead": "read bursts ahead",
    "block": "block size, KiB",
    "skew": "arrays apart, beats",
    "part": "part",
}


def show(rows: list[dict[str, Any]]) -> None:
    """The table: percent of all cycles."""
    head = ("what", "part, units", "% of peak", "refreshes due", "settled")
    table = Table(*head, *(cause.replace("_", " ") for cause in rows[0]["lost"]), "MP/s, 2 ch.")
    for each in rows:
        sweep = each["sweep"]
        table.add_row(
            each["kind"] if sweep is None else f"{TITLES[sweep]}: {NAMES[sweep](each)}",
            f"{each['density']} {each['width']}, {each['functional_units']}",
            f"{100 * each['fraction_of_peak']:.2f}",
            ", ".join(map(str, each["refreshes_due_at_done"])),
            f"{100 * each['fraction_with_due_refreshes']:.2f}",
            *(f"{100 * lost:.3f}" for lost in each["lost"].values()),
            f"{each['params_per_s_two_channels'] / 1e6:.1f}",
        )
    console.print(table)


def plot(rows: list[dict[str, Any]]) -> None:
    """Where cycles are lost, in every sweep."""
    sweeps = {
        title: [(NAMES[sweep](each), each) for each in rows if each["sweep"] == sweep]
        for sweep, title in TITLES.items()
    }
    title = "Adam's traffic on a DDR4-1600 channel of two ranks: 8Gb x8, 16 KiB otherwise"
    bench_channel.draw(sweeps, title, "channel_ranks.png")


def main(
    count: Annotated[int, typer.Option(help="Parameters of a step.")] = 1_000_000,
    sweep: Annotated[
        int, typer.Option(help="Parameters of a step of the traffic model.")
    ] = 250_000,
) -> None:
    """Measure, print, and write build/bench/channel_ranks.json and channel_ranks.png."""
    rows = kernel_rows(count) + traffic_rows(sweep)
    show(rows)
    path = report.write("channel_ranks", {"paper": PAPER, "rows": rows})
    plot(rows)
    console.print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
