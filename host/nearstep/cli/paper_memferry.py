"""`nearstep paper memferry`: sections I, III and V, with the effect of each assumption."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from nearstep.cli.outcome import AsJson, table_of, working
from nearstep.cli.paper_rows import (
    AsCsv,
    Assumptions,
    BarsFile,
    Outputs,
    RowsFile,
    chosen,
    give,
    plain_rows,
    table,
)
from nearstep.paper import memferry
from nearstep.paper.memferry import Evaluation, Sensitivity
from nearstep.paper.rows import Row, errors


def command(
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    output: RowsFile = None,
    bars: BarsFile = None,
    sensitivity: Assumptions = True,
    models: Annotated[
        str, typer.Option(help="Models of the sensitivity table, with commas.")
    ] = ",".join(memferry.MODELS_OF_FIGURE_9),
    rows: Annotated[
        bool, typer.Option("--rows/--no-rows", help="All printed figures; takes a minute.")
    ] = True,
) -> None:
    """Sections I, III and V of MemFerry beside modelled figures."""
    names = chosen(models, memferry.MODELS_OF_FIGURE_9, "--models")
    outputs = Outputs(as_json, as_csv, output, bars)
    outputs.check()
    found: list[Row] = []
    changed: list[Sensitivity] = []
    evaluation = Evaluation()
    with working("section V") as progress:
        for row in evaluation.rows() if rows else ():
            found.append(row)
            progress(f"section V: {row.name}")
        under = memferry.evaluations() if sensitivity else {}
        for each in memferry.sensitivity(names, under):
            changed.append(each)
            progress(f"assumptions: {each.variant}")
        full = sensitivity and names == memferry.MODELS_OF_FIGURE_9
        memory = {name: [*each.memory()] for name, each in under.items()} if full else {}
    plans = [_gaps(evaluation, name) for name in names]
    results = {
        "memory": {variant: plain_rows(each)["rows"] for variant, each in memory.items()},
        "greedy": plans,
        "sensitivity": [asdict(each) for each in changed],
    }
    parts: list[Table | str] = [
        *_means(found),
        _gap_table(plans),
        table("Effect of each assumption (modelled)", changed, SENSITIVE),
        _memory(memory),
    ]
    give(memferry, found, evaluation.inputs, results, parts, outputs)


def _means(rows: Sequence[Row]) -> Iterator[str]:
    """Mean errors of the rows that no input is from, of times and of memory."""
    for title, memory in (("speed and utilisation", False), ("memory", True)):
        found = errors([each for each in rows if memferry.of_memory(each) == memory], apart=True)
        if found is not None:
            yield f"Of the latter, {found.count} of {title}: {found.mean:.1%}."


def _gaps(evaluation: Evaluation, model: str) -> dict[str, Any]:
    """Greedy plans of a model, compared with the exact one."""
    planned = evaluation.ours.named(model).memferry
    readings = {
        str(reading): None if total is None else total / planned.total - 1
        for reading, total in planned.readings.items()
    }
    seconds = planned.total / 1e12
    return {"model": model, "seconds": seconds, "gap": planned.gap, "greedy": readings}


def _gap_table(plans: Sequence[dict[str, Any]]) -> Table:
    columns, rows = ["criterion, gain, base"], []
    for each in plans:
        proven = "" if each["gap"] == 0 else f", within {each['gap']:.2%}"
        columns.append(f">{each['model']}{proven}")
    for reading in plans[0]["greedy"] if plans else ():
        longer = [each["greedy"][reading] for each in plans]
        rows.append((reading, *("no plan" if x is None else f"{x:.2%}" for x in longer)))
    title = "Greedy plans by reading of Algorithm 1: longer than the exact plan by"
    return table_of(columns, rows, title)


SENSITIVE = {
    "assumption": "{0.variant}",
    "model": "{0.model}",
    **{f">{name}": f"{{0.values[{name}]{form}" for name, (form, _) in memferry.SENSITIVE.items()},
    ">over native, updates overlap loads": "{0.overlapped:.2f}",
    ">over native, DHA shares the link": "{0.shared:.2f}",
}
"""Columns of the table of assumptions."""


def _memory(rows: Mapping[str, Sequence[Row]]) -> Table:
    first = next(iter(rows.values()), [])
    named = [f">{row.name.removeprefix('Memory: ')}, {row.section}" for row in first]
    texts = [("*paper*", *(f"{row.paper:.1f}" for row in first))] if first else []
    texts += [(variant, *(f"{row.found:.1f}" for row in each)) for variant, each in rows.items()]
    title = "Rows of memory by assumption, % beside DeepSpeed (modelled)"
    return table_of(("assumption", *named), texts, title)
