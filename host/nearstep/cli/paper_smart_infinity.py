"""`nearstep paper smart-infinity`: its figures and tables, with what each assumption decides."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from nearstep.cli.files import PictureFile, check_picture, check_writable
from nearstep.errors import ArgumentError
from nearstep.paper import smart_infinity
from nearstep.paper.rows import Errors, Row, errors
from nearstep.paper.smart_infinity import Evaluation, Sensitivity
from nearstep.paper.smart_infinity_measured import FOLDER, measured
from nearstep.paper.smart_infinity_picture import draw


def command(
    as_json: Annotated[
        Path | None, typer.Option("--json", help="Write the rows to this file, too.")
    ] = None,
    image: PictureFile = None,
    only: Annotated[
        str, typer.Option(help="Parts of the paper, with commas; all by default.")
    ] = ",".join(smart_infinity.PARTS),
    sensitivity: Annotated[
        bool,
        typer.Option(
            "--sensitivity/--no-sensitivity", help="What each assumption decides; takes minutes."
        ),
    ] = True,
    bench: Annotated[
        Path, typer.Option(help="Folder of what benches have measured; rows say which.")
    ] = FOLDER,
) -> None:
    """Figures 3 and 9 to 17 and Tables I, III, IV of Smart-Infinity, beside what is here."""
    parts = tuple(only.split(","))
    for name in parts:
        if name not in smart_infinity.PARTS:
            known = ", ".join(smart_infinity.PARTS)
            raise typer.BadParameter(f"must be of {known}, not {name!r}", param_hint="--only")
    if image is not None:
        check_picture(image)
    for option, path in (("--json", as_json), ("--picture", image)):
        if path is not None:
            check_writable(option, path)
    try:
        benches = [*measured(bench)]
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--bench") from None
    console = Console()
    rows: list[Row] = []
    changed: list[Sensitivity] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("Smart-Infinity", total=None)
        evaluation = Evaluation()
        for row in evaluation.rows(parts):
            rows.append(row)
            progress.advance(task)
        rows += benches
        for each in smart_infinity.sensitivity() if sensitivity else ():
            changed.append(each)
            progress.advance(task)
        if image is not None:
            draw(evaluation, image)
    console.print(_rows(rows))
    found = errors(rows) if any(row.speedup for row in rows) else None
    _explain(console, evaluation, rows, found)
    if changed:
        console.print(_sensitivity(changed))
    console.print("Not modelled:")
    for name, reason in smart_infinity.NOT_MODELLED.items():
        console.print(f"- {name}: {reason}.", soft_wrap=True)
    console.print("Assumed:")
    for line in smart_infinity.ASSUMPTIONS:
        console.print(f"- {line}", soft_wrap=True)
    if as_json is not None:
        text = json.dumps(plain(evaluation, rows, changed, found), indent=1)
        as_json.write_text(text + "\n", encoding="utf-8")


def plain(
    evaluation: Evaluation,
    rows: Sequence[Row],
    changed: Sequence[Sensitivity],
    found: Errors | None,
) -> dict[str, Any]:
    """All of it for `json.dumps`; errors of `%` and `M` are differences, of others fractions."""
    return {
        "rows": [{**asdict(row), "error": row.error, "holds": row.holds} for row in rows],
        "speedups": None
        if found is None
        else {"mean": found.mean, "largest": found.largest.name, "count": found.count},
        "fitted": _fitted(evaluation),
        "sensitivity": [asdict(each) for each in changed],
        "not_modelled": smart_infinity.NOT_MODELLED,
        "assumptions": list(smart_infinity.ASSUMPTIONS),
    }


def _fitted(evaluation: Evaluation) -> dict[str, float]:
    return {
        "uplink_bytes_per_s": evaluation.machine.uplink_bytes_per_s,
        "gpu": float(evaluation.options.gpu or 0.0),
    }


def _value(value: float | None, unit: str) -> str:
    if value is None:
        return ""
    digits = 4 if unit == "M" else 2
    return f"{value:.{digits}f} {unit}"


def _error(row: Row) -> str:
    if row.holds is not None:
        return "holds" if row.holds else "does not"
    if row.error is None:
        return ""
    if row.unit == "M":
        return f"{row.error:+.4f}"
    return f"{row.error:+.1f} points" if row.unit == "%" else f"{row.error:+.1%}"


def _rows(rows: Sequence[Row]) -> Table:
    table = Table("figure", "where", title="Smart-Infinity")
    for name in ("paper", "here"):
        table.add_column(name, justify="right")
    table.add_column("")
    table.add_column("error", justify="right")
    for row in rows:
        printed = f"{row.relation if row.relation != '=' else ''} {_value(row.paper, row.unit)}"
        kind = row.kind if row.found is not None else row.note
        here = _value(row.found, row.unit)
        table.add_row(row.name, row.section, printed.strip(), here, kind, _error(row))
    return table


def _explain(
    console: Console, evaluation: Evaluation, rows: Sequence[Row], found: Errors | None
) -> None:
    padding = {row.name.partition(":")[0]: row.note for row in rows if row.section == "Table I"}
    for system, note in padding.items():
        console.print(f"{system}: {note}.", soft_wrap=True)
    if found is not None:
        largest = found.largest
        console.print(
            f"Mean error of {found.count} printed speedups {found.mean:.1%}; the largest is "
            f"{largest.error:+.1%}, {largest.name}.",
            soft_wrap=True,
        )
    fitted = _fitted(evaluation)
    console.print(
        f"Fitted, once, on section III: {fitted['uplink_bytes_per_s'] / 1e9:.2f} GB/s of the "
        "uplink, both ways together, so that the baseline gains nothing beyond four SSDs; "
        f"{fitted['gpu']:.1%} of the GPU's peak, so that the update of GPT-2 4.0B on one SSD takes "
        "80 % of an iteration.",
        soft_wrap=True,
    )


def _sensitivity(changed: Sequence[Sensitivity]) -> Table:
    table = Table("assumption", title="What each assumption decides (modelled)")
    for name in ("GPU, of its peak", "mean error", "largest"):
        table.add_column(name, justify="right")
    table.add_column("of")
    table.add_column("SU+O over SU, 10 CSDs", justify="right")
    for each in changed:
        values = [f"{each.gpu:.1%}", f"{each.mean:.1%}", f"{each.largest:+.1%}"]
        table.add_row(each.variant, *values, each.of, f"{each.handler:.2f}")
    return table
