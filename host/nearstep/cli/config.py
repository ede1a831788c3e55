"""`nearstep config`: configurations in DeepSpeed's spelling."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD

from nearstep.cli.outcome import FAILED, AsJson, group, print_json, print_table, reported, table_of
from nearstep.deepspeed.config import check as examine

app = group("Configurations in DeepSpeed's spelling.")


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="JSON file, such as ds_config.json.")],
    auto: Annotated[
        list[str] | None,
        typer.Option(metavar="KEY=VALUE", help='Value of a key that is "auto", as JSON.'),
    ] = None,
    ignore: Annotated[
        list[str] | None, typer.Option(metavar="KEY", help="Ignore this key.")
    ] = None,
    world_size: Annotated[int, typer.Option(min=1, help="Number of training processes.")] = 1,
    as_json: AsJson = False,
) -> None:
    """Print whether each key is used, ignored or refused, and why.

    Nothing is opened. Exit status: 0 if `nearstep.optim.from_deepspeed` accepts the file, 1 if a
    key is refused, 2 if the file is no table in JSON.
    """
    given = dict(_entry(each) for each in auto or ())
    with reported():
        found = examine(file, auto=given, ignore=ignore or (), world_size=world_size)
    if as_json:
        print_json([vars(row) for row in found.rows])
    else:
        columns = ("key", "value", "", "use or reason")
        rows = [(row.key, json.dumps(row.value), row.fate, row.text) for row in found.rows]
        print_table(table_of(columns, rows, box=SIMPLE_HEAD, pad_edge=False))
    if found.problems:
        typer.echo(f"{len(found.problems)} of {len(found.rows)} keys are refused", err=True)
        raise typer.Exit(FAILED)


def _entry(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    try:
        return key, json.loads(value)
    except ValueError:
        if not equals:
            raise typer.BadParameter(f"must be KEY=VALUE, not {text!r}") from None
        return key, value
