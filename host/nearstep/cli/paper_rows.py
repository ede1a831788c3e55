"""Output of `nearstep paper` for every paper: rows, tables, errors and assumptions."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.table import Table

from nearstep.cli.files import check_outputs
from nearstep.cli.outcome import console, print_json, print_table, table_of
from nearstep.paper.bars import draw as draw_bars
from nearstep.paper.rows import Input, Row, Sensitivity, errors


def chosen(text: str, known: Iterable[str], option: str) -> tuple[str, ...]:
    """Split names at commas, each once; raise `typer.BadParameter` if one is not known."""
    names, known = tuple(dict.fromkeys(text.split(","))), tuple(known)
    for name in names:
        if name not in known:
            raise typer.BadParameter(
                f"must be of {', '.join(known)}, not {name!r}", param_hint=option
            )
    return names


RowsFile = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", help="Write what --json prints to this file, or, to a .csv, --csv."
    ),
]

AsCsv = Annotated[bool, typer.Option("--csv", help="Print the rows of figures as CSV.")]

BarsFile = Annotated[
    Path | None,
    typer.Option("--bars", help="Bars of every figure, the paper's beside nearstep's: .png, .svg."),
]

PARTS = typer.Option(help="Parts of the paper, with commas; all by default.")

Assumptions = Annotated[
    bool, typer.Option("--sensitivity/--no-sensitivity", help="Show the effect of each assumption.")
]


@dataclass(frozen=True)
class Outputs:
    """Outputs of a command: text unless `as_json` or `as_csv` is set."""

    as_json: bool
    as_csv: bool
    output: Path | None
    bars: Path | None

    def check(self, **pictures: Path | None) -> None:
        """Refuse both formats, and files that cannot be written, with `typer.BadParameter`.

        Parameters
        ----------
        pictures : further files, by option.
        """
        if self.as_json and self.as_csv:
            raise typer.BadParameter("excludes --json", param_hint="--csv")
        others = {f"--{option}": path for option, path in pictures.items()}
        check_outputs({"--bars": self.bars, **others, "--output": self.output})


def give(
    paper: ModuleType,
    rows: Sequence[Row],
    inputs: Sequence[Input],
    results: Mapping[str, Any],
    parts: Iterable[Table | str],
    outputs: Outputs,
) -> None:
    """Print a paper's figures as CSV; or with further results as JSON; or as tables, followed by
    inputs, figures that are not modelled, with the reasons, and assumptions."""
    left = {"not_modelled": paper.NOT_MODELLED, "assumptions": list(paper.ASSUMPTIONS)}
    given = {**plain_rows(rows), "inputs": [asdict(each) for each in inputs], **results, **left}
    output = outputs.output
    if output is not None and output.suffix == ".csv":
        output.write_text(csv_of(rows), encoding="utf-8")
    elif output is not None:
        output.write_text(json.dumps(given, indent=1) + "\n", encoding="utf-8")
    if outputs.bars is not None:
        draw_bars(rows, outputs.bars)
    if outputs.as_csv:
        typer.echo(csv_of(rows), nl=False)
        return
    if outputs.as_json:
        print_json(given)
        return
    figures = table_of_figures("Printed figures, and figures from here", rows)
    reasons = (f"- {name}: {reason}." for name, reason in paper.NOT_MODELLED.items())
    assumed = (f"- {each}" for each in paper.ASSUMPTIONS)
    tail = ("Inputs:", *map(_text_of, inputs), "Not modelled:", *reasons, "Assumed:", *assumed)
    for part in (figures, *notes(rows), *means(rows), *parts, *tail):
        if isinstance(part, str):
            console().print(part, soft_wrap=True)
        elif part.row_count:
            print_table(part)


def _text_of(each: Input) -> str:
    label = f"{each.label} on {'; '.join(each.on)}" if each.on else each.label
    return f"- {each.name}: {each.value} ({label}): {each.source}."


def csv_of(rows: Iterable[Row]) -> str:
    """Rows as CSV: `error` as in JSON, `holds` of bounds."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = [each.name for each in fields(Row)]
    writer.writerow([*names, "error", "holds"])
    writer.writerows([getattr(row, name) for name in (*names, "error", "holds")] for row in rows)
    return text.getvalue()


def table(title: str, rows: Iterable[Any], columns: Mapping[str, str]) -> Table:
    """A table of rows, by the form of each column: `{0.name}` is an attribute of the row."""
    texts = [tuple(form.format(each) for form in columns.values()) for each in rows]
    return table_of([*columns], texts, title)


def table_of_figures(title: str, rows: Sequence[Row]) -> Table:
    """Make a table of printed figures beside nearstep's."""
    columns = {"figure": "{0.name}", "where": "{0.section}", ">paper": "{0.printed}"}
    columns |= {">here": "{0.here}", "": "{0.how}", ">error": "{0.off}"}
    if any(row.ours is not None for row in rows):
        columns |= {">nearstep's": "{0.beside}"}
    return table(title, rows, columns)


def notes(rows: Iterable[Row]) -> list[str]:
    """Notes of rows that have a figure, each once, with the names of its rows."""
    named: dict[str, list[str]] = {}
    for each in rows:
        if each.note and each.found is not None:
            named.setdefault(each.note, []).append(each.name)
    return [f"{'; '.join(names)}: {note}." for note, names in named.items()]


def table_of_assumptions(changed: Iterable[Sensitivity], values: Mapping[str, str]) -> Table:
    """Errors under each changed assumption, and further columns."""
    columns = {"assumption": "{0.variant}", ">GPU, of its peak": "{0.gpu:.1%}"}
    columns |= {">mean error": "{0.mean:.1%}", ">largest": "{0.largest:+.1%}", "of": "{0.of}"}
    return table("Effect of each assumption (modelled)", changed, {**columns, **values})


def means(rows: Sequence[Row]) -> list[str]:
    """Mean errors as text, of all rows and of those that no input is from; empty if no row
    counts."""
    texts = []
    for apart, of in ((False, "all"), (True, "those that no input is taken from or chosen on")):
        found = errors(rows, apart=apart)
        if found is not None:
            largest = f"{found.largest.fraction:+.1%}, {found.largest.name}"
            texts.append(
                f"Mean error of {found.count} figures ({of}): {found.mean:.1%}; largest {largest}."
            )
    return texts


def plain_rows(rows: Sequence[Row]) -> dict[str, Any]:
    """Convert rows and their mean errors for `json.dumps`.

    Errors of `%` and `M` are differences, of others fractions; `apart` are errors of rows that no
    input is taken from, fitted on or chosen on.
    """
    found = {key: errors(rows, apart=key == "apart") for key in ("all", "apart")}
    return {
        "rows": [{**asdict(row), "error": row.error, "holds": row.holds} for row in rows],
        "errors": {
            key: each and {"mean": each.mean, "largest": each.largest.name, "count": each.count}
            for key, each in found.items()
        },
    }
