"""`nearstep sweep`: a function at every point of a grid."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from nearstep.cli.files import check_outputs
from nearstep.cli.outcome import AsJson, print_json, print_table, reported, table_of
from nearstep.errors import ArgumentError
from nearstep.sweep import BACKENDS, Sweep, SweepError

Rows = Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]


def command(
    file: Annotated[Path, typer.Argument(help="A grid in TOML.", show_default=False)],
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder of results; default: build/sweeps and the file's name."),
    ] = None,
    backend: Annotated[str, typer.Option(help=f"{', '.join(BACKENDS)}.")] = "loky",
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, help="Points at once.")] = 1,
    only: Annotated[
        str | None, typer.Option(help="Results in the table, with commas; default: all.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the table as CSV.")
    ] = None,
    image: Annotated[
        Path | None, typer.Option("--picture", "-p", help="Plot the first number of --only.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Compute the points of a grid that have no result, and print all results.

    A result is a file named by the hash of its inputs: an interrupted sweep is resumed.
    Exit status: 1 if points failed, 2 if the file is invalid.
    """
    check_outputs({"--output": output, "--picture": image})
    sys.path.insert(0, str(file.resolve().parent))  # of modules, as Python's own of a script
    with reported(wrong=(OSError,)):
        sweep = Sweep.read(file)
    with reported():
        place = Path("build/sweeps", file.stem) if folder is None else folder
        screen = Console(stderr=True)
        with Progress(console=screen, transient=True, disable=not screen.is_terminal) as shown:
            task = shown.add_task(f"{len(sweep.points)} points", total=len(sweep.points))
            failed = None
            try:
                sweep.run(
                    place,
                    backend=backend,
                    jobs=jobs,
                    report=lambda done: shown.update(task, completed=done),
                )
            except SweepError as error:  # raised after the results of the others are printed
                failed = error
        found = sweep.results(place)
        if failed is not None and not found:
            raise failed
        if as_json:
            print_json([{**point, **result} for point, result in found])
        names = _names(found, only)
        rows = [
            [*(_text(p[n]) for n in sweep.axes), *(_text(r.get(n)) for n in names)]
            for p, r in found
        ]
        columns = [*sweep.axes, *(f">{name}" for name in names)]
        if not as_json:
            print_table(table_of(columns, rows, f"{file.name}: results in {place}"))
        if output is not None:
            with output.open("w", newline="", encoding="utf-8") as stream:
                csv.writer(stream).writerows([[*sweep.axes, *names], *rows])
        if image is not None:
            _plot(found, sweep.axes, names, image)
        if failed is not None:
            raise failed


def _names(found: Rows, only: str | None) -> list[str]:
    """Names of results to show, in the order of the first point.

    Raises
    ------
    ArgumentError : there is no such result.
    """
    known = [*dict.fromkeys(name for _, result in found for name in result)]
    if only is None:
        return known
    names = only.split(",")
    for name in names:
        if name not in known:
            raise ArgumentError(f"--only must be of {', '.join(known)}, not {name!r}")
    return names


def _text(value: object) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _plot(found: Rows, axes: Sequence[str], names: Sequence[str], image: Path) -> None:
    """Plot the first result that is a number over the first axis; a line for each other point.

    Raises
    ------
    ArgumentError : no result is a number, or there is no axis.
    """
    from matplotlib.figure import Figure  # in the extra `torch`

    numbers = [n for n in names if all(isinstance(r.get(n), int | float) for _, r in found)]
    if not (numbers and axes):
        raise ArgumentError("--picture needs an axis, and a result that is a number at all points")
    lines: dict[str, list[tuple[Any, float]]] = {}
    for point, result in found:
        label = ", ".join(f"{name}={_text(point[name])}" for name in axes[1:])
        lines.setdefault(label, []).append((point[axes[0]], result[numbers[0]]))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    plot = figure.subplots()
    for label, points in lines.items():
        x, y = zip(*points, strict=True)
        of_numbers = all(isinstance(each, int | float) for each in x)
        plot.plot(x if of_numbers else [*map(str, x)], y, "o-", label=label)
    plot.set(xlabel=axes[0], ylabel=numbers[0])
    if any(isinstance(point[axes[0]], str) for point, _ in found):
        plot.tick_params(axis="x", labelrotation=20)
    if len(lines) > 1 or axes[1:]:
        plot.legend(fontsize=8)
    figure.savefig(image)
