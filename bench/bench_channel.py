"""The Adam kernel on a DDR4-1600 channel: data beats over all cycles from START to done.

Cycles are those of the controller's RTL against the rank model, which judges every command;
refresh is on, every beat is compared. `kernel` rows are the kernel's RTL but for its arithmetic,
`traffic` rows a C++ model of its bus traffic, which can be swept without a build for each shape.
A run may end with up to eight refreshes due; `settled` is the share as if they had been given
before done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import report
import typer
from rich.console import Console
from rich.progress import track
from rich.table import Table

from nearstep.paper.axdimm_kernel import AXDIMM
from nearstep_hw.dram.column_stage import Slot
from nearstep_sim.models.dram.bench import Channel, ChannelRun, bases_of, run_kernel, run_traffic
from nearstep_spec.dram.address import DEFAULT_MAPPING, MAPPINGS
from nearstep_spec.dram.geometry import BEAT_BYTES

BLOCKS_KIB = (1, 2, 4, 8, 16, 32, 64)
UNITS = (1, 2, 4, 8, 16)
PARTS = (("4Gb", "x8"), ("8Gb", "x8"), ("16Gb", "x8"), ("8Gb", "x16"), ("32Gb", "x16"))
KERNEL_PARTS = (("8Gb", "x8"), ("16Gb", "x8"), ("32Gb", "x16"))
"""The last one is that of the paper."""

SKEW_BEATS = (0, 4, 8, 16, 37)
CHANNELS = 2
PAPER: dict[str, Any] = {
    "label": "paper (32Gb parts, two channels)",
    "params_per_s": AXDIMM.achieved,
    "peak_params_per_s": AXDIMM.theoretical,
    "fraction_of_peak": AXDIMM.efficiency,
}
LOSSES = tuple(slot for slot in Slot if slot not in (Slot.READ, Slot.WRITE))
COLORS = {
    "refresh": "tab:blue",
    "turnaround": "tab:green",
    "row": "tab:orange",
    "bank_group": "tab:red",
    "empty": "tab:purple",
    "start": "tab:brown",
    "drain": "tab:pink",
}
"""Causes of lost cycles, from the bottom of a bar to its top; `space` is always 0 here."""

Sweeps = Mapping[str, Sequence[tuple[str, dict[str, Any]]]]

MEANINGS = {
    "refresh": "refresh",
    "turnaround": "read and write, or ranks, change",
    "row": "row not open yet",
    "bank_group": "bank group repeats",
    "empty": "no request: the units are busy",
    "start": "start: before the first beat",
    "drain": "drain: after the last beat",
}

console = Console(width=190)  # of the table, also where the output is a file


def row(kind: str, run: ChannelRun, **shape: Any) -> dict[str, Any]:
    """One measurement as plain data."""
    return {
        "label": "measured (RTL cycles)",
        "kind": kind,
        **asdict(run.channel),
        "parameters": run.count,
        "sweep": None,
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
    shapes = [(part, units) for part in KERNEL_PARTS for units in (16, 4)]
    return [
        row(
            "kernel",
            run_kernel(Channel(density=density, width=width), count=count, functional_units=units),
            functional_units=units,
        )
        for (density, width), units in track(shapes, "kernel RTL", console=console)
    ]


def traffic_rows(count: int) -> list[dict[str, Any]]:
    channel = Channel()
    rows = [
        row(
            "traffic",
            run_traffic(channel, count=count, block_bytes=kib << 10),
            sweep="block",
            block_kib=kib,
        )
        for kib in track(BLOCKS_KIB, "block sizes", console=console)
    ]
    rows += [
        row(
            "traffic",
            run_traffic(channel, count=count, functional_units=units),
            sweep="units",
            functional_units=units,
        )
        for units in track(UNITS, "functional units", console=console)
    ]
    rows += [
        row(
            "traffic",
            run_traffic(channel, count=count, bases=bases_of(channel, count, skew * BEAT_BYTES)),
            sweep="skew",
            skew_beats=skew,
        )
        for skew in track(SKEW_BEATS, "banks of the arrays", console=console)
    ]
    rows += [
        row(
            "traffic", run_traffic(Channel(density=density, width=width), count=count), sweep="part"
        )
        for density, width in track(PARTS, "parts", console=console)
    ]
    rows += [
        row("traffic", run_traffic(Channel(mapping=mapping), count=count), sweep="mapping")
        for mapping in track(MAPPINGS, "mappings", console=console)
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
        *(cause.replace("_", " ") for cause in rows[0]["lost"]),
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
    """Where cycles are lost, in every sweep."""
    traffic = [each for each in rows if each["kind"] == "traffic"]
    sweeps = {
        "block size, KiB": [
            (str(each["block_kib"]), each) for each in traffic if each["sweep"] == "block"
        ],
        "functional units": [
            (str(each["functional_units"]), each) for each in traffic if each["sweep"] == "units"
        ],
        "part": [
            (f"{each['density']} {each['width']}", each)
            for each in traffic
            if each["sweep"] == "part"
        ],
        "arrays apart, beats": [
            (str(each["skew_beats"]), each) for each in traffic if each["sweep"] == "skew"
        ],
        "address mapping": [
            (each["mapping"].replace("-", "\n"), each)
            for each in traffic
            if each["sweep"] == "mapping"
        ],
    }
    title = "Adam's traffic on one DDR4-1600 channel: 8Gb x8, 16 KiB, 16 units otherwise"
    draw(sweeps, title, "channel.png")


def draw(sweeps: Sweeps, title: str, file: str) -> None:
    """A picture of at most five sweeps: names and rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, grid = pyplot.subplots(2, 3, figsize=(13, 7.5))
    for axes, (sweep, bars) in zip(grid.flat, sweeps.items(), strict=False):
        names = [name for name, _ in bars]
        bottom = [0.0] * len(bars)
        for cause, color in COLORS.items():
            lost = [100 * each["lost"][cause] for _, each in bars]
            axes.bar(names, lost, bottom=bottom, color=color, width=0.75)
            bottom = [a + b for a, b in zip(bottom, lost, strict=True)]
        for x, ((_, each), top) in enumerate(zip(bars, bottom, strict=True)):
            share = f"{100 * each['fraction_of_peak']:.2f}"
            axes.text(x, top, share, ha="center", va="bottom", fontsize="small")
        axes.set_ylim(0, 1.1 * max(bottom))
        axes.set_title(sweep)
        axes.tick_params(axis="x", labelsize="small")
        axes.set_ylabel("lost cycles, %")
    legend = grid.flat[-1]
    legend.axis("off")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    names = [MEANINGS[cause] for cause in COLORS]
    legend.legend(handles[::-1], names[::-1], loc="center", frameon=False,
                  title="above each bar: data, % of all cycles\n"
                  f"paper: {100 * PAPER['fraction_of_peak']:.2f}\n")  # fmt: skip
    figure.suptitle(title)
    figure.tight_layout()
    figure.savefig(report.FOLDER / file, dpi=110)


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
