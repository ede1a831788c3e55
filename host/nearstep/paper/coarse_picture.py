"""A picture of the COARSE paper's modelled rows and timelines."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from nearstep.coarse.iteration import DOWN, PROXIES, UP
from nearstep.paper.bars import bars
from nearstep.paper.coarse_timeline import Cost, Pushed, Run
from nearstep.paper.rows import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def draw(
    rows: Sequence[Row], run: Run, pipelines: Sequence[Pushed], costs: Sequence[Cost], path: Path
) -> None:
    """Draw speedups, time over m, figure 9, and cost over the number of devices.

    Parameters
    ----------
    rows : of which printed speedups are drawn.
    run : drawn over m.
    path : of any kind that matplotlib writes.
    """
    from matplotlib.figure import Figure  # in the extra `torch`, which the rows do not need

    figure = Figure(figsize=(13, 9), layout="constrained")
    axes = figure.subplots(2, 2)
    bars(axes[0][0], [row for row in rows if row.mean])
    axes[0][0].set(xlabel="times as fast", title="Speedups of figure 16")
    _split(axes[0][1], run)
    _pipelines(axes[1][0], pipelines)
    _costs(axes[1][1], costs)
    figure.savefig(path)


def _split(axes: Axes, run: Run) -> None:
    found = run.sweep()
    n = run.inputs.nbytes
    parts = [m / n for m, _ in found]
    axes.plot(parts, [1e3 * run.estimated(m) for m, _ in found], label="T_train")
    axes.plot(parts, [1e3 * seconds for _, seconds in found], "o", label="timeline")
    axes.axvline(run.m / n, color="grey", linestyle=":", label="m* of the closed form")
    axes.set(
        xlabel="m / n, to the memory devices",
        ylabel="ms of an iteration, modelled",
        title=f"{run.model}, {run.workers} workers of {run.machine}",
        ylim=(0, None),
    )
    axes.legend(fontsize=8)


def _pipelines(axes: Axes, pipelines: Sequence[Pushed]) -> None:
    lanes = (UP, PROXIES, DOWN)
    names = []
    for number, each in enumerate(pipelines):
        kind = "whole" if each.shard_bytes is None else "shards"
        for lane, resource in enumerate(lanes):
            place = number * (len(lanes) + 0.6) + lane
            names.append((place, f"{kind}: {resource}"))
            for entry in each.timeline.lanes[resource]:
                tensor = int(entry.operation.name.split()[1].split(".")[0])
                bar = (entry.start / 1e9, entry.duration / 1e9)
                axes.broken_barh([bar], (place - 0.4, 0.8), color=f"C{tensor}")
    axes.set_yticks([place for place, _ in names], [name for _, name in names], fontsize=8)
    axes.invert_yaxis()
    axes.set(xlabel="ms, modelled", title="Four tensors of 64 MiB in all, a colour each (figure 9)")


def _costs(axes: Axes, costs: Sequence[Cost]) -> None:
    lines: dict[tuple[int, str], list[Cost]] = {}
    for each in costs:
        fabric = each.fabric
        links = f"{fabric.uplinks} uplink{'s' if fabric.uplinks > 1 else ''}"
        name = "one ring" if fabric.racks == 1 else f"racks of {fabric.devices}, {links}"
        lines.setdefault((each.nbytes, name), []).append(each)
    kinds = [*dict.fromkeys(name for _, name in lines)]
    sizes = [*dict.fromkeys(nbytes for nbytes, _ in lines)]
    for (nbytes, name), line in lines.items():
        axes.plot(
            [each.fabric.members for each in line],
            [each.cycles_per_kib for each in line],
            ("o-", "s--")[sizes.index(nbytes) % 2],
            color=f"C{kinds.index(name)}",
            markersize=4,
            label=f"{nbytes >> 20} MiB, {name}",
        )
    axes.set_xscale("log", base=2)
    axes.set(
        xlabel="devices",
        ylabel="cycles a KiB of the tensor, modelled",
        title="A sum over many devices",
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
