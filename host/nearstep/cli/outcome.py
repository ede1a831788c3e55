"""Output of every command: tables, JSON, progress and errors."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from nearstep.errors import NearstepError

FAILED, WRONG = 1, 2
"""Exit statuses: a failed check, device, drive, program or package; an invalid option, device name
or file.
"""

UNBOUNDED = 1 << 14
"""Columns without a terminal: more than any table needs."""

Errors = tuple[type[Exception], ...]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


def group(text: str) -> typer.Typer:
    """A command that consists of others, even of one."""
    app = typer.Typer(help=text, no_args_is_help=True)
    app.callback()(lambda: None)
    return app


@contextmanager
def reported(*, wrong: Errors = (), failed: Errors = ()) -> Iterator[None]:
    """Print an error of the body as a line on standard error, and end the command.

    The exit status is `WRONG` for a `ValueError`, such as every `ArgumentError`, else `FAILED`.

    Parameters
    ----------
    wrong, failed : errors that have that status regardless.
    """
    known: Errors = (NearstepError, ModuleNotFoundError, OSError, *wrong, *failed)
    try:
        yield
    except known as error:
        advice = "; see nearstep doctor" if isinstance(error, ModuleNotFoundError) else ""
        typer.echo(f"error: {error}{advice}", err=True)
        at_fault = isinstance(error, (ValueError, *wrong)) and not isinstance(error, failed)
        raise typer.Exit(WRONG if at_fault else FAILED) from None


def console(*, markup: bool = False) -> Console:
    """Standard output, without names of emoji; without a terminal lines are not wrapped, also with
    forced colours."""
    width = None if sys.stdout.isatty() else UNBOUNDED
    return Console(markup=markup, emoji=False, highlight=False, width=width)


def table_of(
    columns: Sequence[str], rows: Iterable[Sequence[str]], title: str | None = None, **style: Any
) -> Table:
    """A table of texts.

    Parameters
    ----------
    columns : names; `>` begins the name of a right-aligned column.
    rows : an empty one ends a section.
    style : options of `rich.table.Table`.
    """
    table = Table(title=title, **style)
    for name in columns:
        table.add_column(name.removeprefix(">"), justify="right" if name[:1] == ">" else "left")
    for row in rows:
        if row:
            table.add_row(*row)
        else:
            table.add_section()
    return table


def print_table(table: Table, *, markup: bool = False) -> None:
    """Print a table; a terminal that is too narrow wraps its cells."""
    for column in table.columns:
        column.overflow = "fold"
    console(markup=markup).print(table)


def print_json(value: Any) -> None:
    """Print the JSON of `--json`; numbers that JSON has not are the texts `nan`, `inf`, `-inf`."""
    typer.echo(json.dumps(_finite(value), indent=2, allow_nan=False))


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [*map(_finite, value)]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@contextmanager
def working(what: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show progress on standard error, if it is a terminal.

    The yielded function ends a part and names the next one.

    Parameters
    ----------
    what : name of the first part.
    total : number of parts, if known.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    bar = () if total is None else (BarColumn(),)
    shown = Console(stderr=True)
    with Progress(
        *columns, *bar, console=shown, transient=True, disable=not shown.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda part: progress.update(task, advance=1, description=part)
