"""`nearstep paper memferry`: section V, with the effect of each assumption."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.table import Table

from nearstep.cli.files import check_outputs
from nearstep.cli.outcome import AsJson, table_of, working
from nearstep.cli.paper_rows import RowsFile, chosen, give_json, print_report
from nearstep.paper import memferry
from nearstep.paper.memferry import Evaluation, Modelled, Sensitivity


def command(
    as_json: AsJson = False,
    output: RowsFile = None,
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity/--no-sensitivity", help="Show the effect of each assumption."),
    ] = True,
    models: Annotated[
        str, typer.Option(help="Models of the sensitivity table, with commas.")
    ] = ",".join(memferry.MODELS_OF_FIGURE_9),
    rows: Annotated[
        bool, typer.Option("--rows/--no-rows", help="All printed figures; takes a minute.")
    ] = True,
) -> None:
    """Section V of MemFerry beside modelled figures."""
    names = chosen(models, memferry.MODELS_OF_FIGURE_9, "--models")
    check_outputs({"--output": output})
    found: list[Modelled] = []
    changed: list[Sensitivity] = []
    evaluation = Evaluation()
    with working("section V") as progress:
        for row in evaluation.rows() if rows else ():
            found.append(row)
            progress(f"section V: {row.name}")
        under = memferry.evaluations()
        for each in memferry.sensitivity(names, under) if sensitivity else ():
            changed.append(each)
            progress(f"assumptions: {each.variant}")
        full = sensitivity and names == memferry.MODELS_OF_FIGURE_9
        memory = {name: [*each.memory()] for name, each in under.items()} if full else {}
    plans = [_gaps(evaluation, name) for name in names]
    give_json(plain(found, plans, changed, memory), as_json, output)
    if as_json:
        return
    tables = (_rows(found), _gap_table(plans), _sensitivity(changed), _memory(memory))
    title = "*modelled*: no constant is fitted. Assumed:"
    print_report(tables, memferry.NOT_MODELLED, memferry.ASSUMPTIONS, title)


def plain(
    rows: Sequence[Modelled],
    gaps: Sequence[dict[str, Any]],
    changed: Sequence[Sensitivity],
    memory: Mapping[str, Sequence[Modelled]],
) -> dict[str, Any]:
    """Convert all tables for `json.dumps`."""
    return {
        "label": "modelled",
        "rows": _with_errors(rows),
        "memory": {variant: _with_errors(each) for variant, each in memory.items()},
        "not_modelled": memferry.NOT_MODELLED,
        "greedy": list(gaps),
        "sensitivity": [asdict(each) for each in changed],
        "assumptions": list(memferry.ASSUMPTIONS),
    }


def _with_errors(rows: Sequence[Modelled]) -> list[dict[str, Any]]:
    return [{**asdict(row), "error": row.error} for row in rows]


def _gaps(evaluation: Evaluation, model: str) -> dict[str, Any]:
    """Greedy plans of a model, compared with the exact one."""
    planned = evaluation.named(model).memferry
    readings = {
        str(reading): None if total is None else total / planned.total - 1
        for reading, total in planned.readings.items()
    }
    return {
        "model": model,
        "seconds": planned.total / 1e12,
        "gap": planned.gap,
        "greedy": readings,
    }


def _rows(rows: Sequence[Modelled]) -> Table:
    texts = []
    for row in rows:
        digits = 1 if row.unit == "%" else 2
        error = f"{row.error:+.1f} points" if row.unit == "%" else f"{row.error:+.1%}"
        values = [f"{each:.{digits}f} {row.unit}" for each in (row.paper, row.modelled)]
        texts.append((row.name, row.section, *values, error))
    columns = ("figure", "where", ">paper", ">modelled", ">error")
    return table_of(columns, texts, "MemFerry, section V")


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


def _sensitivity(changed: Sequence[Sensitivity]) -> Table:
    more = ("over native, updates overlap loads", "over native, DHA shares the link")
    columns = ("assumption", "model", *(f">{name}" for name in (*memferry.SENSITIVE, *more)))
    rows, last = [], ""
    for each in changed:
        values = [
            f"{value:.2f}" if memferry.SENSITIVE[name][0] == "x" else f"{value:.1f} %"
            for name, value in each.values.items()
        ]
        shown = each.variant if each.variant != last else ""
        rows.append((shown, each.model, *values, f"{each.overlapped:.2f}", f"{each.shared:.2f}"))
        last = each.variant
    return table_of(columns, rows, "Effect of each assumption (modelled)")


def _memory(rows: Mapping[str, Sequence[Modelled]]) -> Table:
    first = next(iter(rows.values()), [])
    named = [f">{row.name.removeprefix('Memory: ')}, {row.section}" for row in first]
    texts = [("*paper*", *(f"{row.paper:.1f}" for row in first))] if first else []
    texts += [(variant, *(f"{row.modelled:.1f}" for row in each)) for variant, each in rows.items()]
    title = "Rows of memory by assumption, % beside DeepSpeed (modelled)"
    return table_of(("assumption", *named), texts, title)
