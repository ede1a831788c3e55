"""`nearstep storage`: drives that hold tensors."""

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

from nearstep.cli.outcome import (
    FAILED,
    AsJson,
    group,
    print_json,
    print_table,
    reported,
    table_of,
    working,
)
from nearstep.storage.check import SetReport, check_drives, sets_of
from nearstep.storage.drive import QUEUE_DEPTH
from nearstep.storage.drive_errors import (
    DriveIOError,
    DriveLockedError,
    DriveTimeoutError,
    ShortTransferError,
    StorageError,
)

DRIVES = (DriveIOError, DriveLockedError, DriveTimeoutError, ShortTransferError)
"""Errors of drives that cannot be read now; after other errors, other paths must be given."""

app = group("Drives that hold tensors: files and block devices.")


@app.command("check")
def check(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR|FILE...",
            help="Drives, or folders with drives: all of each set.",
            show_default=False,
        ),
    ],
    as_json: AsJson = False,
    direct: Annotated[
        bool,
        typer.Option(help="Read with O_DIRECT, past the page cache."),
    ] = True,
    queue_depth: Annotated[int, typer.Option(help="Reads in flight on each drive.")] = QUEUE_DEPTH,
) -> None:
    """Read everything on drives, and compare every CRC: superblocks, indices, extents.

    Nothing is written. Exit status: 0 if every generation is intact; 1 if one is damaged, or drives
    are in use by another process or fail; 2 if other paths must be given: no drives, or an
    incomplete set. An unfinished commit of a power cut is printed as a note, not as damage.
    """
    with reported(wrong=(StorageError,), failed=DRIVES):
        reports = _checked(paths, direct, queue_depth)
    if as_json:
        print_json([{**asdict(each), "whole": each.whole} for each in reports])
    else:
        for report in reports:
            _print(report)
    if not all(report.whole for report in reports):
        raise typer.Exit(FAILED)


@app.command("export")
def export(
    paths: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR|FILE...",
            help="Drives of all ranks, or folders with drives.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", help="Folder of the two files.", show_default=False),
    ],
    name: Annotated[
        str, typer.Option(help="Name of a kept generation; default: the last one of all ranks.")
    ] = "",
) -> None:
    """Write a generation to model.safetensors and optimizer.safetensors.

    All ranks' shards become whole tensors, a piece at a time. The drives are only read.
    """
    with reported(wrong=(StorageError,), failed=DRIVES), working("import of torch") as report:
        from nearstep.torch.export import export_safetensors  # torch is an extra

        report("export")
        files = export_safetensors(list(sets_of(paths).values()), output, name=name)
    for each in files:
        typer.echo(f"{each}: {each.stat().st_size / 1e6:.1f} MB")


def _checked(paths: list[Path], direct: bool, queue_depth: int) -> list[SetReport]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), DownloadColumn())
    console = Console(stderr=True)
    with Progress(
        *columns,
        TransferSpeedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        reports = []
        for set_id, drives in sets_of(paths).items():
            task = bar.add_task(f"set {set_id}", total=None)
            told = partial(bar.advance, task)
            reports.append(
                check_drives(drives, direct=direct, queue_depth=queue_depth, progress=told)
            )
        return reports


def _print(report: SetReport) -> None:
    typer.echo(f"set {report.set_id} of {report.owner!r}: {', '.join(report.drives)}")
    rows = []
    for each in report.generations:
        state = f"{len(each.problems)} problems" if each.problems else "whole"
        numbers = (each.number, each.tensors, each.extents, f"{each.nbytes / 1e6:.1f}")
        rows.append((*map(str, numbers), json.dumps(each.meta)[:60], state))
    print_table(table_of(("generation", "tensors", "extents", "MB", "meta", ""), rows))
    for problem in [*report.problems, *(p for g in report.generations for p in g.problems)]:
        typer.echo(f"problem: {problem}")
    for note in report.notes:
        typer.echo(f"note: {note}")
