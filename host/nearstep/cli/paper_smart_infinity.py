"""`nearstep paper smart-infinity`: its figures and tables, with the effect of each assumption."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from nearstep.cli.files import PictureFile
from nearstep.cli.outcome import AsJson, working
from nearstep.cli.paper_rows import (
    PARTS,
    AsCsv,
    BarsFile,
    Outputs,
    RowsFile,
    chosen,
    give,
    table_of_assumptions,
)
from nearstep.errors import ArgumentError
from nearstep.paper import smart_infinity
from nearstep.paper.rows import Row, labelled
from nearstep.paper.smart_infinity import Evaluation, Variant
from nearstep.paper.smart_infinity_measured import FOLDER, measured
from nearstep.paper.smart_infinity_picture import draw


def command(
    as_json: AsJson = False,
    as_csv: AsCsv = False,
    output: RowsFile = None,
    bars: BarsFile = None,
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
    """Figures 3, 9 to 15 and 17 and Tables I, III, IV of Smart-Infinity beside nearstep's."""
    parts = chosen(only, smart_infinity.PARTS, "--only")
    outputs = Outputs(as_json, as_csv, output, bars)
    outputs.check(picture=image)
    try:
        benches = [*measured(bench)]
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--bench") from None
    rows: list[Row] = []
    changed: list[Variant] = []
    with working("Smart-Infinity") as progress:
        evaluation = Evaluation()
        for row in labelled(evaluation.rows(parts), evaluation.inputs):
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
    handler = table_of_assumptions(changed, {">SU+O over SU, 10 CSDs": "{0.handler:.2f}"})
    results = {"sensitivity": [asdict(each) for each in changed]}
    give(smart_infinity, rows, evaluation.inputs, results, [handler], outputs)
