"""`nearstep paper coarse`: its figures and Table I, with the effect of each assumption."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Annotated, Any

import typer

from nearstep.cli.files import PictureFile
from nearstep.cli.outcome import AsJson, working
from nearstep.cli.paper_rows import (
    PARTS,
    AsCsv,
    Assumptions,
    BarsFile,
    Outputs,
    RowsFile,
    chosen,
    give,
    table,
    table_of_assumptions,
)
from nearstep.paper import coarse
from nearstep.paper.coarse import Evaluation
from nearstep.paper.coarse_picture import draw
from nearstep.paper.coarse_timeline import Cost, Pushed, Run, costs, pushed, runs
from nearstep.paper.rows import labelled


def command(
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    output: RowsFile = None,
    bars: BarsFile = None,
    image: PictureFile = None,
    only: Annotated[str, PARTS] = ",".join(coarse.PARTS),
    sensitivity: Assumptions = True,
    timeline: Annotated[
        bool,
        typer.Option(
            "--timeline/--no-timeline",
            help="Iterations with dual synchronization, the pipeline of figure 9, and sums over "
            "up to 1,024 devices, on the timeline; takes a minute.",
        ),
    ] = True,
) -> None:
    """Figures 2, 3, 8, 13, 14, 16, 17 and Table I of COARSE beside modelled ones."""
    parts = chosen(only, coarse.PARTS, "--only")
    if image is not None and (not timeline or parts != tuple(coarse.PARTS)):
        raise typer.BadParameter(
            "needs all parts: omit --no-timeline and --only", param_hint="--picture"
        )
    outputs = Outputs(as_json, as_csv, output, bars)
    outputs.check(picture=image)
    evaluation = Evaluation()
    rows = [*labelled(evaluation.rows(parts), evaluation.inputs)]
    changed = [*coarse.sensitivity()] if sensitivity else []
    shares = {"peak": 1.0, "fitted": float(evaluation.options.gpu or 1.0)}
    dual: list[dict[str, Any]] = []
    sums: list[Cost] = []
    pipelines = pushed() if timeline else []
    with working("timelines") as progress:
        for share, gpu in shares.items() if timeline else ():
            for run in runs(gpu):
                dual.append({"gpu": share, **_dual(run)})
                progress(f"timelines: {run.model} on {run.machine}")
        for cost in costs() if timeline else ():
            sums.append(cost)
            progress(f"timelines: {cost.fabric.members} devices")
        if image is not None:
            draw(rows, next(runs(shares["fitted"])), pipelines, sums, image)
    results = {
        "sensitivity": [asdict(each) for each in changed],
        "dual": dual,
        "pipeline": [_pipeline(each) for each in pipelines],
        "scale": [_cost(each) for each in sums],
    }
    decided = {f">{title}": f"{{0.values[{title}]:.2f}}" for title in coarse.SENSITIVE.values()}
    tables = (
        *(("The means count the speedups of figure 16.",) if "figure-16" in parts else ()),
        table_of_assumptions(changed, decided),
        table("Dual synchronization on the timeline", map(_in_ms, dual), DUAL),
        table("Push, sync, pull (figure 9; modelled)", pipelines, PIPELINES),
        table("A sum over many devices (modelled)", sums, COSTS),
    )
    give(coarse, rows, evaluation.inputs, results, tables, outputs)


DUAL = {
    "GPU": "{0[gpu]}",
    "machine": "{0[workers]} of {0[machine]}",
    "model": "{0[model]}",
    ">m* / n": "{0[m_of_n]:.3f}",
    ">T_train": "{0[t_train_ms]:.1f} ms",
    ">timeline at m*": "{0[timeline_ms]:.1f} ms",
    ">ratio": "{0[ratio]:.3f}",
    ">best m / n": "{0[best_m_of_n]:.3f}",
    ">ratio there": "{0[best_ratio]:.3f}",
}
PIPELINES = {
    "64 MiB in four tensors": "{0.kind}",
    ">time": "{0.ms:.2f} ms",
    ">over the bound": "{0.over_bound:.2f}",
    ">link up busy": "{0.busy[0]:.0%}",
    ">down": "{0.busy[1]:.0%}",
}
COSTS = {
    "tensor": "{0.mib} MiB",
    "devices": "{0.fabric.members:,}",
    "rings": "{0.rings}",
    ">cycles": "{0.cycles:,}",
    ">cycles a KiB": "{0.cycles_per_kib:.1f}",
    ">of the bound": "{0.of_bound:.1%}",
}
"""Columns of the tables."""


def _dual(run: Run) -> dict[str, Any]:
    """A run at m*, and the best of it and a sweep on the timeline."""
    m, n = run.m, run.inputs.nbytes
    estimated, here = run.estimated(m), run.on_timeline(m)
    best = min([*run.sweep(), (m, here)], key=lambda each: each[1])
    return {
        "machine": run.machine,
        "workers": run.workers,
        "model": run.model,
        "m_of_n": m / n,
        "t_train_s": estimated,
        "timeline_s": here,
        "ratio": here / estimated,
        "best_m_of_n": best[0] / n,
        "best_ratio": best[1] / estimated,
    }


def _in_ms(run: Mapping[str, Any]) -> dict[str, Any]:
    return {**run, **{f"{name}_ms": 1e3 * run[f"{name}_s"] for name in ("t_train", "timeline")}}


def _pipeline(each: Pushed) -> dict[str, Any]:
    return {
        "shard_bytes": each.shard_bytes,
        "seconds": each.timeline.seconds,
        "bound_s": each.bound,
        "busy_up": each.busy[0],
        "busy_down": each.busy[1],
    }


def _cost(each: Cost) -> dict[str, Any]:
    fabric = each.fabric
    return {
        "devices": fabric.members,
        "racks": fabric.racks,
        "uplinks": fabric.uplinks,
        "nbytes": each.nbytes,
        "cycles": each.cycles,
        "cycles_per_kib": each.cycles_per_kib,
        "of_bound": each.of_bound,
    }
