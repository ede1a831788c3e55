"""How every command shows what it found, that it is at work, and why it failed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from nearstep.errors import NearstepError

__all__ = [
    "FAILED",
    "WRONG",
    "AsJson",
    "console",
    "print_json",
    "print_table",
    "reported",
    "working",
]

FAILED, WRONG = 1, 2
"""Exit statuses. Something did not hold or did not work: a check, a device, a drive, a program, a
package. What was given cannot be: an option, a name of a device, a file."""

UNBOUNDED = 1 << 14
"""Columns where there is no terminal: more than a table has."""

Errors = tuple[type[Exception], ...]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]


@contextmanager
def reported(*, wrong: Errors = (), failed: Errors = ()) -> Iterator[None]:
    """End the command with an error of what is inside, as a line on standard error.

    The status is `WRONG` of a `ValueError`, which all `ArgumentError`s are, else `FAILED`.

    Parameters
    ----------
    wrong, failed : errors that have that status, whatever they are.
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
    """Standard output. Where it is no terminal a line is as long as it has to be."""
    made = Console(markup=markup, highlight=False)
    if made.is_terminal:
        return made
    return Console(markup=markup, highlight=False, width=UNBOUNDED)


def print_table(table: Table, *, markup: bool = False) -> None:
    """Print a table; on a terminal that is too narrow its words go on in the next line."""
    for column in table.columns:
        column.overflow = "fold"
    console(markup=markup).print(table)


def print_json(value: Any) -> None:
    """Print what `--json` asks for."""
    typer.echo(json.dumps(value, indent=2))


@contextmanager
def working(what: str, total: int | None = None) -> Iterator[Callable[[str], None]]:
    """Show on a terminal's standard error, as long as it takes, that the command is at work.

    What is given ends a part of it, and names the next one.

    Parameters
    ----------
    what : the first part.
    total : parts, if that is known.
    """
    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    bar = () if total is None else (BarColumn(),)
    shown = Console(stderr=True)
    with Progress(
        *columns, *bar, console=shown, transient=True, disable=not shown.is_terminal
    ) as progress:
        task = progress.add_task(what, total=total)
        yield lambda part: progress.update(task, advance=1, description=part)
