"""The Adam kernel on a DDR4-1600 channel: data beats over all cycles from START to done.

Cycles are those of the controller's RTL against the rank model, which judges every command;
refresh is on, every beat is compared. `kernel` rows are the kernel's RTL but for its arithmetic,
`traffic` rows a C++ model of its bus traffic, which can be swept without a build for each shape.
A run may end with up to eight refreshes due; `settled` is the share as if they had been given
before done.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any

import report
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nearstep_hw.dram.address import DEFAULT_MAPPING, MAPPINGS
from nearstep_hw.dram.column_stage import Slot
from nearstep_hw.dram.geometry import BEAT_BYTES
from nearstep_sim.dram.bench import Channel, ChannelRun, bases_of, run_kernel, run_traffic

BLOCKS_KIB = (1, 2, 4, 8, 16, 32, 64)
UNITS = (1, 2, 4, 8, 16)
PARTS = (("4Gb", "x8"), ("8Gb", "x8"), ("16Gb", "x8"), ("8Gb", "x16"))
SKEW_BEATS = (4, 8, 16, 37)
CHANNELS = 2
PAPER = {
    "label": "paper (32Gb parts, two channels)",
    "params_per_s": 789.38e6,
    "peak_params_per_s": 914.29e6,
    "fraction_of_peak": 789.38 / 914.29,
}
LOSSES = tuple(slot for slot in Slot if slot not in (Slot.READ, Slot.WRITE))

console = Console(width=190)  # of the table, also where the output is a file


def row(kind: str, run: ChannelRun, **shape: Any) -> dict[str, Any]:
    """One measurement as plain data."""
    return {
        "label": "measured (RTL cycles)",
        "kind": kind,
        **asdict(run.channel),
        "parameters": run.count,
        "block_kib": 16,
        "functional_units": 16,
        "skew_beats": 0,
        **shape,
        "cycles": run.cycles,
        "fraction_of_peak": run.efficiency,
        "fraction_with_due_refreshes": run.settled_efficiency,
        "refresh_bound": run.channel.timing.refresh_bound,
        "lost": {
            **{slot.name.lower(): run.slots[slot] / run.cycles for slot in LOSSES},
            "start": run.start / run.cycles,
            "drain": run.drain / run.cycles,
        },
        "refreshes_due_at_done": run.debt,
        "params_per_s_two_channels": CHANNELS * run.elements_per_second,
        "beats_compared": run.checks,
    }


def kernel_rows(count: int) -> list[dict[str, Any]]:
    shapes = [(density, units) for density in ("8Gb", "16Gb") for units in (16, 4)]
    return [
        row(
            "kernel",
            run_kernel(Channel(density=density), count=count, functional_units=units),
            functional_units=units,
        )
        for density, units in track(shapes, "kernel RTL", console=console)
    ]


def traffic_rows(count: int) -> list[dict[str, Any]]:
    channel = Channel()
    rows = [
        row("traffic", run_traffic(channel, count=count, block_bytes=kib << 10), block_kib=kib)
        for kib in track(BLOCKS_KIB, "block sizes", console=console)
    ]
    rows += [
        row(
            "traffic",
            run_traffic(channel, count=count, functional_units=units),
            functional_units=units,
        )
        for units in track(UNITS, "functional units", console=console)
    ]
    rows += [
        row(
            "traffic",
            run_traffic(channel, count=count, bases=bases_of(channel, count, skew * BEAT_BYTES)),
            skew_beats=skew,
        )
        for skew in track(SKEW_BEATS, "banks of the arrays", console=console)
    ]
    rows += [
        row("traffic", run_traffic(Channel(density=density, width=width), count=count))
        for density, width in track(PARTS, "parts", console=console)
    ]
    rows += [
        row("traffic", run_traffic(Channel(mapping=mapping), count=count))
        for mapping in track(MAPPINGS[1:], "mappings", console=console)
    ]
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    """The table: percent of all cycles."""
    table = Table(
        *(
            "what",
            "part",
            "mapping",
            "KiB",
            "units",
            "skew",
            "% of peak",
            "refreshes due",
            "settled",
            "bound",
        ),
        *(slot.name.lower().replace("_", " ") for slot in LOSSES),
        "MP/s, 2 ch.",
    )
    for each in rows:
        mapping = "default" if each["mapping"] == DEFAULT_MAPPING else each["mapping"]
        table.add_row(
            each["kind"],
            f"{each['density']} {each['width']}",
            mapping,
            str(each["block_kib"]),
            str(each["functional_units"]),
            str(each["skew_beats"]),
            f"{100 * each['fraction_of_peak']:.2f}",
            str(each["refreshes_due_at_done"]),
            f"{100 * each['fraction_with_due_refreshes']:.2f}",
            f"{100 * each['refresh_bound']:.2f}",
            *(f"{100 * lost:.3f}" for lost in each["lost"].values()),
            f"{each['params_per_s_two_channels'] / 1e6:.1f}",
        )
    console.print(table)
    console.print(
        f"paper: {PAPER['params_per_s'] / 1e6:.2f} of {PAPER['peak_params_per_s'] / 1e6:.2f} MP/s, "
        f"{100 * PAPER['fraction_of_peak']:.1f} % of peak"
    )


def plot(rows: list[dict[str, Any]]) -> None:
    """Share of the peak over the block size, and where the rest goes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sweep = [each for each in rows if each["kind"] == "traffic"][: len(BLOCKS_KIB)]
    names = [f"{each['block_kib']} KiB" for each in sweep]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    bottom = [100 * each["fraction_of_peak"] for each in sweep]
    axes.bar(names, bottom, color="lightgrey", label="data")
    for slot in LOSSES:
        lost = [100 * each["lost"][slot.name.lower()] for each in sweep]
        axes.bar(names, lost, bottom=bottom, label=slot.name.lower().replace("_", " "))
        bottom = [a + b for a, b in zip(bottom, lost, strict=True)]
    paper = 100 * float(str(PAPER["fraction_of_peak"]))
    axes.axhline(paper, color="black", linestyle=":", label="paper, 16 KiB")
    axes.set_ylim(70, 100.5)
    axes.set_xlabel("block of one array")
    axes.set_ylabel("% of the column slots")
    axes.legend(bbox_to_anchor=(1.01, 1), loc="upper left", fontsize="small")
    figure.tight_layout()
    figure.savefig(report.FOLDER / "channel.png", dpi=150)


def main(
    count: Annotated[int, typer.Option(help="Parameters of a step.")] = 1_000_000,
) -> None:
    """Measure, print, and write build/bench/channel.json and channel.png."""
    rows = kernel_rows(count) + traffic_rows(count)
    show(rows)
    path = report.write("channel", {"paper": PAPER, "rows": rows})
    plot(rows)
    console.print(f"written: {path}")


if __name__ == "__main__":
    typer.run(main)
