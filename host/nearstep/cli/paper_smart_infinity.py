"""`nearstep paper smart-infinity`: its figures and tables, with the effect of each assumption."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from nearstep.cli.files import PictureFile, check_outputs
from nearstep.cli.outcome import AsJson, working
from nearstep.cli.paper_rows import (
    PARTS,
    RowsFile,
    chosen,
    give,
    plain_rows,
    speedups,
    table_of_assumptions,
    table_of_figures,
)
from nearstep.errors import ArgumentError
from nearstep.paper import smart_infinity
from nearstep.paper.rows import Row
from nearstep.paper.smart_infinity import Evaluation, Variant
from nearstep.paper.smart_infinity_measured import FOLDER, measured
from nearstep.paper.smart_infinity_picture import draw


def command(
    as_json: AsJson = False,
    output: RowsFile = None,
    image: PictureFile = None,
    only: Annotated[str, PARTS] = ",".join(smart_infinity.PARTS),
    sensitivity: Annotated[
        bool | None,
        typer.Option(
            "--sensitivity/--no-sensitivity",
            help="Show the effect of each assumption, over all parts; takes minutes.",
            show_default="with all parts",
        ),
    ] = None,
    bench: Annotated[
        Path, typer.Option(help="Folder of the benches' results; rows name the bench.")
    ] = FOLDER,
) -> None:
    """Figures 3 and 9 to 17 and Tables I, III, IV of Smart-Infinity beside nearstep's."""
    parts = chosen(only, smart_infinity.PARTS, "--only")
    check_outputs({"--output": output, "--picture": image})
    try:
        benches = [*measured(bench)]
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--bench") from None
    rows: list[Row] = []
    changed: list[Variant] = []
    with working("Smart-Infinity") as progress:
        evaluation = Evaluation()
        for row in evaluation.rows(parts):
            rows.append(row)
            progress(row.name)
        rows += benches
        if sensitivity is None:
            sensitivity = set(parts) == set(smart_infinity.PARTS)
        for each in smart_infinity.sensitivity() if sensitivity else ():
            changed.append(each)
            progress(f"assumptions: {each.variant}")
        if image is not None:
            draw(evaluation, image)
    fitted = {
        "uplink_bytes_per_s": evaluation.machine.uplink_bytes_per_s,
        "gpu": float(evaluation.options.gpu or 0.0),
    }
    text = (
        f"Fitted, once, on section III: {fitted['uplink_bytes_per_s'] / 1e9:.2f} GB/s of the "
        "uplink, both ways together, so that the baseline gains nothing beyond four SSDs; "
        f"{fitted['gpu']:.1%} of the GPU's peak, so that the update of GPT-2 4.0B on one SSD takes "
        "80 % of an iteration."
    )
    padding = {row.name.partition(":")[0]: row.note for row in rows if row.section == "Table I"}
    notes = [f"{system}: {note}." for system, note in padding.items()]
    decided = table_of_assumptions(changed, {">SU+O over SU, 10 CSDs": "{0.handler:.2f}"})
    figures = table_of_figures("Smart-Infinity", rows)
    report: list[Table | str] = [figures, *notes, *speedups(rows), text, decided]
    variants = [asdict(each) for each in changed]
    results = {**plain_rows(rows), "fitted": fitted, "sensitivity": variants}
    give(smart_infinity, results, report, as_json, output)
