"""Output of `nearstep paper` for every paper: rows, errors and assumptions."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from nearstep.cli.outcome import console, print_json, print_table, table_of
from nearstep.paper.rows import Errors, Row, Sensitivity


def chosen(text: str, known: Iterable[str], option: str) -> tuple[str, ...]:
    """Split names at commas; raise `typer.BadParameter` if one is not known."""
    names, known = tuple(text.split(",")), tuple(known)
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"must be of {', '.join(known)}, not {name!r}", param_hint=option
            )
    return names


RowsFile = Annotated[
    Path | None, typer.Option("--output", "-o", help="Write what --json prints to this file, too.")
]


def give_json(rows: Any, as_json: bool, output: Path | None) -> None:
    """Write the JSON of `--json` to a file, print it, or neither."""
    if output is not None:
        output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if as_json:
        print_json(rows)


def table_of_figures(rows: Sequence[Row], title: str) -> Table:
    """Make a table of printed figures beside nearstep's."""
    texts = []
    for row in rows:
        printed = f"{row.relation if row.relation != '=' else ''} {_value(row.paper, row.unit)}"
        kind = row.kind if row.found is not None else row.note
        here = _value(row.found, row.unit)
        texts.append((row.name, row.section, printed.strip(), here, kind, _error(row)))
    return table_of(("figure", "where", ">paper", ">here", "", ">error"), texts, title)


def table_of_assumptions(
    changed: Sequence[Sensitivity], names: Sequence[str], values: Callable[[Any], Iterable[str]]
) -> Table:
    """Make a table of errors, and of `values` by their names, for each changed assumption."""
    columns = ["assumption", ">GPU, of its peak", ">mean error", ">largest", "of"]
    rows = [
        (
            each.variant,
            *(f"{each.gpu:.1%}", f"{each.mean:.1%}", f"{each.largest:+.1%}", each.of),
            *values(each),
        )
        for each in changed
    ]
    columns += [f">{name}" for name in names]
    return table_of(columns, rows, "Effect of each assumption (modelled)")


def speedups(found: Errors | None) -> list[str]:
    """Format mean and largest error of the printed speedups."""
    if found is None:
        return []
    return [
        f"Mean error of {found.count} printed speedups {found.mean:.1%}; the largest is "
        f"{found.largest.error:+.1%}, {found.largest.name}."
    ]


def print_report(
    parts: Iterable[Table | str],
    not_modelled: Mapping[str, str],
    assumptions: Iterable[str],
    title: str = "Assumed:",
) -> None:
    """Print non-empty tables and paragraphs, then figures that are not modelled, with reasons, and
    the assumptions.
    """
    left = [f"- {name}: {reason}." for name, reason in not_modelled.items()]
    for part in (*parts, "Not modelled:", *left, title, *(f"- {each}" for each in assumptions)):
        if isinstance(part, str):
            console().print(part, soft_wrap=True)
        elif part.row_count:
            print_table(part)


def plain_rows(rows: Sequence[Row], found: Errors | None) -> dict[str, Any]:
    """Convert rows and the errors of their speedups for `json.dumps`.

    Errors of `%` and `M` are differences, of others fractions.
    """
    return {
        "rows": [{**asdict(row), "error": row.error, "holds": row.holds} for row in rows],
        "speedups": None
        if found is None
        else {"mean": found.mean, "largest": found.largest.name, "count": found.count},
    }


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    digits = 4 if unit == "M" else 2
    return f"{value:.{digits}f} {unit}".strip()


def _error(row: Row) -> str:
    if row.holds is not None:
        return "holds" if row.holds else "does not"
    if row.error is None:
        return ""
    if row.unit == "M":
        return f"{row.error:+.4f}"
    return f"{row.error:+.1f} points" if row.unit == "%" else f"{row.error:+.1%}"
