"""The Adam kernel on a DDR4-1600 channel: data beats over all cycles from START to done.

The rank model judges every command. Traffic can be swept without a build for each shape.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

from harness import Results, option, plot, report, script, track

from nearstep.paper.axdimm_kernel import AXDIMM
from nearstep_hw.dram.column_stage import Slot
from nearstep_sim.models.dram.bench import Channel, ChannelRun, bases_of, run_kernel, run_traffic
from nearstep_spec.dram.address import MAPPINGS
from nearstep_spec.dram.geometry import BEAT_BYTES

BLOCKS_KIB = (1, 2, 4, 8, 16, 32, 64)
PARTS = ("4Gb x8", "8Gb x8", "16Gb x8", "8Gb x16", "32Gb x16")
KERNEL_PARTS = (("8Gb", "x8"), ("16Gb", "x8"), ("32Gb", "x16"))  # the last one is that of the paper
CHANNELS = 2
PAPER = {
    "params_per_s": AXDIMM.achieved,
    "peak_params_per_s": AXDIMM.theoretical,
    "fraction_of_peak": AXDIMM.efficiency,
}
LOSSES = tuple(slot for slot in Slot if slot not in (Slot.READ, Slot.WRITE))
CAUSES = {
    "refresh": ("refresh", "tab:blue"),
    "turnaround": ("read and write, or ranks, change", "tab:green"),
    "row": ("row not open yet", "tab:orange"),
    "bank_group": ("bank group repeats", "tab:red"),
    "empty": ("no request: the units are busy", "tab:purple"),
    "start": ("start: before the first beat", "tab:brown"),
    "drain": ("drain: after the last beat", "tab:pink"),
}
"""Causes of lost cycles from the bottom of a bar to its top, and their colours; `space` is always
0 here."""

Sweep = tuple[str, str, Sequence[Any]]  # title in a picture, name of a row, and values
SWEEPS: Mapping[str, Sweep] = {
    "block": ("block size, KiB", "blocks of {} KiB", BLOCKS_KIB),
    "units": ("functional units", "functional units: {}", (1, 2, 4, 8, 16)),
    "skew": ("arrays apart, beats", "arrays {} beats apart in banks", (0, 4, 8, 16, 37)),
    "part": ("part", "{}", PARTS),
    "mapping": ("address mapping", "{}", MAPPINGS),
}


def row(run: ChannelRun, what: str, **more: Any) -> Results:
    return {
        **asdict(run.channel), **more, "what": what, "parameters": run.count, "cycles": run.cycles,
        "fraction_of_peak": run.efficiency, "fraction_with_due_refreshes": run.settled_efficiency,
        "refresh_bound": run.channel.timing.refresh_bound,
        "lost": {
            **{slot.name.lower(): run.slots[slot] / run.cycles for slot in LOSSES},
            "start": run.start / run.cycles,
            "drain": run.drain / run.cycles,
        },
        "due": " + ".join(map(str, run.debts)),
        "params_per_s_two_channels": CHANNELS * run.elements_per_second,
        "beats_compared": run.checks}  # fmt: skip


def kernel_rows(count: int, **channel: Any) -> list[Results]:
    rows = []
    for (density, width), units in track([(p, u) for p in KERNEL_PARTS for u in (16, 4)], "RTL"):
        part = Channel(density=density, width=width, **channel)
        run = run_kernel(part, count=count, functional_units=units)
        rows.append(row(run, f"{density} {width}, {units}", functional_units=units))
    return rows


def traffic(sweep: str, value: Any, count: int, **channel: Any) -> ChannelRun:
    options: dict[str, Any] = {}
    match sweep:
        case "part":
            channel |= dict(zip(("density", "width"), value.split(), strict=True))
        case "mapping":
            channel["mapping"] = value
        case "interleave":
            channel["interleave"] = value << 10
        case "skew":
            options["bases"] = bases_of(Channel(**channel), count, value * BEAT_BYTES)
        case "block":
            options["block_bytes"] = value << 10
        case "units":
            options["functional_units"] = value
        case "bursts ahead":
            options["bursts_ahead"] = value
    return run_traffic(Channel(**channel), count=count, **options)


def traffic_rows(sweeps: Mapping[str, Sweep], count: int, **channel: Any) -> list[Results]:
    return [
        row(traffic(sweep, value, count, **channel), what.format(value), sweep=sweep, value=value)
        for sweep, (title, what, values) in sweeps.items()
        for value in track(values, title)
    ]


def draw(rows: Iterable[Results], sweeps: Mapping[str, Sweep], title: str, file: str) -> None:
    from matplotlib.patches import Patch

    with plot(file, 2, 3, figsize=(13, 7.5), title=title, dpi=110) as (_, grid):
        for axes, (sweep, (name, *_)) in zip(grid.flat, sweeps.items(), strict=False):
            bars = [each for each in rows if each["sweep"] == sweep]
            names = [f"{each['value']}".replace("-", "\n") for each in bars]
            bottom = [0.0] * len(bars)
            for cause, (_, color) in CAUSES.items():
                some = [100 * each["lost"][cause] for each in bars]
                axes.bar(names, some, bottom=bottom, color=color, width=0.75)
                bottom = [a + b for a, b in zip(bottom, some, strict=True)]
            for x, (each, top) in enumerate(zip(bars, bottom, strict=True)):
                share = f"{100 * each['fraction_of_peak']:.2f}"
                axes.text(x, top, share, ha="center", va="bottom", fontsize="small")
            axes.set(ylim=(0, 1.1 * max(bottom)), title=name, ylabel="lost cycles, %")
            axes.tick_params(axis="x", labelsize="small")
        grid.flat[-1].axis("off")
        handles = [Patch(color=color, label=meaning) for meaning, color in CAUSES.values()]
        said = f"above each bar: data, % of all cycles\npaper: {100 * AXDIMM.efficiency:.2f}\n"
        grid.flat[-1].legend(handles=handles[::-1], loc="center", frameon=False, title=said)


@script
def main(count: Annotated[int, option("Parameters of a step.")] = 1_000_000) -> None:
    """Measure, print, and write build/bench/channel.json and channel.png."""
    kernel, rows = kernel_rows(count), traffic_rows(SWEEPS, count)
    title = "Adam's traffic on one DDR4-1600 channel: 8Gb x8, 16 KiB, 16 units otherwise"
    draw(rows, SWEEPS, title, "channel.png")
    report("channel", paper=PAPER, kernel=kernel, traffic=rows)
