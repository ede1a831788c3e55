"""`nearstep paper coarse`: its figures and Table I, with the effect of each assumption."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from nearstep.cli.files import PictureFile, check_outputs
from nearstep.cli.outcome import AsJson, table_of, working
from nearstep.cli.paper_rows import (
    RowsFile,
    chosen,
    give_json,
    plain_rows,
    print_report,
    speedups,
    table_of_assumptions,
    table_of_figures,
)
from nearstep.paper import coarse
from nearstep.paper.coarse import Evaluation, Variant
from nearstep.paper.coarse_picture import draw
from nearstep.paper.coarse_timeline import Cost, Pushed, Run, costs, pushed, runs
from nearstep.paper.rows import errors


def command(
    as_json: AsJson = False,
    output: RowsFile = None,
    image: PictureFile = None,
    only: Annotated[
        str, typer.Option(help="Parts of the paper, with commas; all by default.")
    ] = ",".join(coarse.PARTS),
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity/--no-sensitivity", help="Show the effect of each assumption."),
    ] = True,
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
    check_outputs({"--output": output, "--picture": image})
    evaluation = Evaluation()
    rows = [*evaluation.rows(parts)]
    found = errors(rows) if any(row.speedup for row in rows) else None
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
    written = {
        **plain_rows(rows, found),
        "fitted": {"gpu": evaluation.options.gpu},
        "sensitivity": [asdict(each) for each in changed],
        "dual": dual,
        "pipeline": [_pipeline(each) for each in pipelines],
        "scale": [_cost(each) for each in sums],
        "not_modelled": coarse.NOT_MODELLED,
        "assumptions": list(coarse.ASSUMPTIONS),
    }
    give_json(written, as_json, output)
    if as_json:
        return
    given = sum(row.kind == "input" for row in rows)
    fitted = (
        f"Fitted, once, on section II: {evaluation.options.gpu:.1%} of a GPU's peak, so that "
        "communication is 76 % of BERT's training on four T4. "
        f"{given} rows are inputs: what is printed is what the machines have."
    )
    notes = [f"{row.name}: {row.note}." for row in rows if row.note]
    tables = (_sensitivity(changed), _dual_table(dual), _pipelines(pipelines), _costs(sums))
    print_report(
        [table_of_figures(rows, "COARSE"), *notes, *speedups(found), fitted, *tables],
        coarse.NOT_MODELLED,
        coarse.ASSUMPTIONS,
    )


def _dual(run: Run) -> dict[str, Any]:
    """A run at m*, and the best of a sweep on the timeline."""
    m, n = run.m, run.inputs.nbytes
    best = min(run.sweep(), key=lambda each: each[1])
    estimated, here = run.estimated(m), run.on_timeline(m)
    return {
        "machine": run.machine,
        "workers": run.workers,
        "model": run.model,
        "m_of_n": m / n,
        "t_train_s": estimated,
        "timeline_s": here,
        "ratio": here / estimated,
        "best_m_of_n": best[0] / n,
        "best_ratio": min(best[1], here) / estimated,
    }


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


def _sensitivity(changed: Sequence[Variant]) -> Table:
    titles = [*coarse.SENSITIVE.values()]
    return table_of_assumptions(
        changed, titles, lambda each: [f"{each.values[name]:.2f}" for name in titles]
    )


def _dual_table(dual: Iterable[Mapping[str, Any]]) -> Table:
    columns = ("GPU", "machine", "model")
    right = (">m* / n", ">T_train", ">timeline at m*", ">ratio", ">best m / n", ">ratio there")
    rows = [
        (
            each["gpu"],
            f"{each['workers']} of {each['machine']}",
            each["model"],
            f"{each['m_of_n']:.3f}",
            *(f"{1e3 * each[name]:.1f} ms" for name in ("t_train_s", "timeline_s")),
            *(f"{each[name]:.3f}" for name in ("ratio", "best_m_of_n", "best_ratio")),
        )
        for each in dual
    ]
    return table_of((*columns, *right), rows, "Dual synchronization on the timeline")


def _pipelines(pipelines: Sequence[Pushed]) -> Table:
    rows = []
    for each in pipelines:
        kind = "whole" if each.shard_bytes is None else f"shards of {each.shard_bytes >> 20} MiB"
        seconds = float(each.timeline.seconds or 0)
        busy = (f"{share:.0%}" for share in each.busy)
        rows.append((kind, f"{1e3 * seconds:.2f} ms", f"{seconds / each.bound:.2f}", *busy))
    columns = ("64 MiB in four tensors", ">time", ">over the bound", ">link up busy", ">down")
    return table_of(columns, rows, "Push, sync, pull (figure 9; modelled)")


def _costs(sums: Sequence[Cost]) -> Table:
    rows = []
    for each in sums:
        fabric = each.fabric
        rings = "one"
        if fabric.racks > 1:
            links = "uplink" if fabric.uplinks == 1 else "uplinks"
            rings = f"{fabric.racks} racks of {fabric.devices}, {fabric.uplinks} {links}"
        figures = (f"{each.cycles:,}", f"{each.cycles_per_kib:.1f}", f"{each.of_bound:.1%}")
        rows.append((f"{each.nbytes >> 20} MiB", f"{fabric.members:,}", rings, *figures))
    columns = ("tensor", "devices", "rings", ">cycles", ">cycles a KiB", ">of the bound")
    return table_of(columns, rows, "A sum over many devices (modelled)")
