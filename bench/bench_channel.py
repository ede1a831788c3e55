"""The Adam kernel on a DDR4-1600 channel: data beats over all cycles from START to done.

Cycles are those of the controller's RTL against the rank model, which judges every command;
refresh is on, every beat is compared. `kernel` rows are the kernel's RTL but for its arithmetic,
`traffic` rows a C++ model of its bus traffic, which can be swept without a build for each shape.
A run may end with up to eight refreshes due; `settled` is the share as if they had been given
before done.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from harness import PERCENT, Bench, Column, Results, Table, plot, track

from nearstep.paper.axdimm_kernel import AXDIMM
from nearstep_hw.dram.column_stage import Slot
from nearstep_sim.models.dram.bench import Channel, ChannelRun, bases_of, run_kernel, run_traffic
from nearstep_spec.dram.address import MAPPINGS
from nearstep_spec.dram.geometry import BEAT_BYTES

BLOCKS_KIB = (1, 2, 4, 8, 16, 32, 64)
PARTS = (("4Gb", "x8"), ("8Gb", "x8"), ("16Gb", "x8"), ("8Gb", "x16"), ("32Gb", "x16"))
KERNEL_PARTS = (("8Gb", "x8"), ("16Gb", "x8"), ("32Gb", "x16"))
"""The last one is that of the paper."""

CHANNELS = 2
PAPER = {
    "params_per_s": AXDIMM.achieved,
    "peak_params_per_s": AXDIMM.theoretical,
    "fraction_of_peak": AXDIMM.efficiency,
}
LOSSES = tuple(slot for slot in Slot if slot not in (Slot.READ, Slot.WRITE))
CAUSES = {
    "refresh": ("refresh", "refresh", "tab:blue"),
    "turnaround": ("turnaround", "read and write, or ranks, change", "tab:green"),
    "row": ("row", "row not open yet", "tab:orange"),
    "bank_group": ("bank group", "bank group repeats", "tab:red"),
    "empty": ("units busy", "no request: the units are busy", "tab:purple"),
    "start": ("start", "start: before the first beat", "tab:brown"),
    "drain": ("drain", "drain: after the last beat", "tab:pink"),
}
"""Causes of lost cycles, from the bottom of a bar to its top, as a table and a picture have them,
and their colours; `space` is always 0 here."""

Sweep = tuple[str, str, Sequence[Any]]
"""Title in a picture, name of a row, and values."""

SWEEPS: Mapping[str, Sweep] = {
    "block": ("block size, KiB", "blocks of {} KiB", BLOCKS_KIB),
    "units": ("functional units", "functional units: {}", (1, 2, 4, 8, 16)),
    "skew": ("arrays apart, beats", "arrays {} beats apart in banks", (0, 4, 8, 16, 37)),
    "part": ("part", "{}", [" ".join(part) for part in PARTS]),
    "mapping": ("address mapping", "{}", MAPPINGS),
}


def lost(causes: Mapping[str, str]) -> list[Column]:
    """Columns of lost cycles, by cause and name."""
    return [Column(f"{name}, %", f"lost/{cause}", ".3f*100") for cause, name in causes.items()]


def columns(*first: Column, ranks: bool = False) -> list[Column]:
    """Columns of a run behind those that name it."""
    bound = () if ranks else (Column("refresh bound", "refresh_bound", PERCENT, kind="modelled"),)
    due = lambda row: " + ".join(map(str, row["refreshes_due_at_done"]))  # noqa: E731
    rate = "params_per_s_two_channels"
    return [
        *first,
        Column("of peak", "fraction_of_peak", PERCENT),
        Column("settled", "fraction_with_due_refreshes", PERCENT),
        *bound,
        *lost({cause: name for cause, (name, *_) in CAUSES.items()}),
        Column("due", due if ranks else "refreshes_due_at_done"),
        Column("MP/s, 2 channels", rate, ".1f/1e6", kind="modelled"),
    ]


def runs(sweeps: Mapping[str, Sweep], *, ranks: bool = False) -> tuple[Table, Table]:
    """Tables of the kernel's runs, and of those of its traffic."""
    name = lambda row: f"{row['density']} {row['width']}, {row['functional_units']}"  # noqa: E731
    swept = lambda row: sweeps[row["sweep"]][1].format(row["value"])  # noqa: E731
    kernel, traffic = (
        lambda results, kind=kind: [row for row in results["rows"] if row["kind"] == kind]
        for kind in ("kernel", "traffic")
    )
    return (
        Table(kernel, *columns(Column("part, functional units", name), ranks=ranks)),
        Table(traffic, *columns(Column("what", swept), ranks=ranks)),
    )


KERNEL, TRAFFIC = runs(SWEEPS)
BENCH = Bench(
    "channel",
    "## The kernel on a DDR4 channel",
    """
    The controller in RTL with one rank, *measured* in cycles from START to done, refresh on,
    1,000,000 parameters, every beat compared. The host and the mode arbiter are not in it:
    see the module below. Two channels at 200 MHz are *modelled* as twice one. *Due* counts
    the refreshes that are still owed at done; *settled* is the share if they had been given
    before. Lost cycles: *units busy* is a controller without a request, *start* and *drain*
    lie before the first and after the last column command. *Paper*: \
{paper[params_per_s]:.2f/1e6} of {paper[peak_params_per_s]:.2f/1e6} MP/s, \
{paper[fraction_of_peak]:.2f*100 %}, on 32Gb parts.

    The kernel's RTL, with stand-ins of equal latency for its arithmetic; 16 KiB blocks:
    """,
    KERNEL,
    """
    A C++ model of the kernel's traffic; 8Gb x8, 16 KiB blocks, 16 units,
    {rows[0][mapping]}, where nothing else is said:
    """,
    TRAFFIC,
    "![Where the cycles go](channel.png)",
)


def row(kind: str, run: ChannelRun, **shape: Any) -> Results:
    """Make a row of a run."""
    return {
        "kind": kind,
        **asdict(run.channel),
        "parameters": run.count,
        "functional_units": 16,
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
        "refreshes_due_at_done": run.debt if len(run.debts) == 1 else list(run.debts),
        "params_per_s_two_channels": CHANNELS * run.elements_per_second,
        "beats_compared": run.checks,
    }


def kernel_rows(count: int, **channel: Any) -> list[Results]:
    """Measure the kernel's RTL on each part."""
    shapes = [(part, units) for part in KERNEL_PARTS for units in (16, 4)]
    return [
        row(
            "kernel",
            run_kernel(
                Channel(density=density, width=width, **channel),
                count=count,
                functional_units=units,
            ),
            functional_units=units,
        )
        for (density, width), units in track(shapes, "kernel RTL")
    ]


def traffic(sweep: str, value: Any, count: int, **channel: Any) -> ChannelRun:
    """Run the traffic with one value of a sweep."""
    options: dict[str, Any] = {}
    if sweep == "part":
        channel |= dict(zip(("density", "width"), value.split(), strict=True))
    elif sweep == "mapping":
        channel["mapping"] = value
    elif sweep == "interleave":
        channel["interleave"] = value << 10
    elif sweep == "skew":
        options["bases"] = bases_of(Channel(**channel), count, value * BEAT_BYTES)
    else:
        name, unit = {
            "block": ("block_bytes", 1024),
            "units": ("functional_units", 1),
            "bursts ahead": ("bursts_ahead", 1),
        }[sweep]
        options[name] = value * unit
    return run_traffic(Channel(**channel), count=count, **options)


def traffic_rows(sweeps: Mapping[str, Sweep], count: int, **channel: Any) -> list[Results]:
    """Measure each value of each sweep."""
    return [
        row("traffic", traffic(sweep, value, count, **channel), sweep=sweep, value=value)
        for sweep, (title, _, values) in sweeps.items()
        for value in track(values, title)
    ]


def draw(rows: Iterable[Results], sweeps: Mapping[str, Sweep], title: str, file: str) -> None:
    """Draw where cycles are lost, in at most five sweeps."""
    from matplotlib.patches import Patch

    with plot(file, 2, 3, figsize=(13, 7.5), title=title, dpi=110) as (_, grid):
        for axes, (sweep, (name, *_)) in zip(grid.flat, sweeps.items(), strict=False):
            bars = [each for each in rows if each.get("sweep") == sweep]
            names = [f"{each['value']}".replace("-", "\n") for each in bars]
            bottom = [0.0] * len(bars)
            for cause, (*_, color) in CAUSES.items():
                some = [100 * each["lost"][cause] for each in bars]
                axes.bar(names, some, bottom=bottom, color=color, width=0.75)
                bottom = [a + b for a, b in zip(bottom, some, strict=True)]
            for x, (each, top) in enumerate(zip(bars, bottom, strict=True)):
                share = f"{100 * each['fraction_of_peak']:.2f}"
                axes.text(x, top, share, ha="center", va="bottom", fontsize="small")
            axes.set(ylim=(0, 1.1 * max(bottom)), title=name, ylabel="lost cycles, %")
            axes.tick_params(axis="x", labelsize="small")
        grid.flat[-1].axis("off")
        handles = [Patch(color=color, label=meaning) for _, meaning, color in CAUSES.values()]
        said = f"above each bar: data, % of all cycles\npaper: {100 * AXDIMM.efficiency:.2f}\n"
        grid.flat[-1].legend(handles=handles[::-1], loc="center", frameon=False, title=said)


def main(
    count: Annotated[int, typer.Option(help="Parameters of a step.")] = 1_000_000,
) -> None:
    """Measure, print, and write build/bench/channel.json and channel.png."""
    rows = kernel_rows(count) + traffic_rows(SWEEPS, count)
    title = "Adam's traffic on one DDR4-1600 channel: 8Gb x8, 16 KiB, 16 units otherwise"
    draw(rows, SWEEPS, title, "channel.png")
    BENCH.report(paper=PAPER, rows=rows)


if __name__ == "__main__":
    typer.run(main)
