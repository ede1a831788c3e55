"""The `nearstep` command. Other packages add commands through `nearstep.commands`."""

import importlib.metadata
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from typing import TextIO

import typer

from nearstep.cli import (
    axdimm,
    cache,
    card,
    coarse,
    config,
    devices,
    doctor,
    offload,
    paper,
    peers,
    plan,
    platform,
    registers,
    storage,
    sweep,
    trace,
)
from nearstep.cli import open as open_device
from nearstep.cli.outcome import FAILED, WRONG
from nearstep.errors import NearstepError


def _version(show: bool) -> None:
    if show:
        typer.echo(importlib.metadata.version("nearstep"))
        raise typer.Exit


def _app() -> typer.Typer:
    app = typer.Typer(
        help="Near-data optimizer steps, from RTL to optimizer.step().",
        no_args_is_help=True,
        pretty_exceptions_show_locals=False,
    )

    @app.callback()
    def root(
        version: bool = typer.Option(
            False, "--version", callback=_version, is_eager=True, help="Print the version."
        ),
    ) -> None:
        pass

    for module in (devices, doctor, offload, open_device, peers, plan, sweep, trace, registers):
        _command(app, module.__name__.rpartition(".")[2], module.command)
    for group in (axdimm, cache, card, coarse, config, paper, platform, storage):
        app.add_typer(group.app, name=group.__name__.rpartition(".")[2])
    for entry in sorted(importlib.metadata.entry_points(group="nearstep.commands")):
        _add(app, entry)
    return app


def _add(app: typer.Typer, entry: importlib.metadata.EntryPoint) -> None:
    try:
        command = entry.load()
    except ImportError as error:
        reason = str(error)

        def missing() -> None:
            typer.echo(f"error: {entry.name} cannot run: {reason}; see nearstep doctor", err=True)
            raise typer.Exit(FAILED)

        app.command(entry.name, help=f"(unavailable: {reason})")(missing)
        return
    if isinstance(command, typer.Typer):
        app.add_typer(command, name=entry.name)
    else:
        _command(app, entry.name, command)


def _command(app: typer.Typer, name: str, command: Callable[..., None]) -> None:
    """Add a command, with its parser settings if any."""
    settings = getattr(command, "context_settings", None)
    app.command(name, context_settings=settings)(command)


def _printable(stream: TextIO | object) -> None:
    """Print characters that a terminal lacks as question marks, not a traceback."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None and not str(getattr(stream, "encoding", "")).startswith("utf"):
        reconfigure(errors="replace")


def main() -> None:
    """Entry point of the `nearstep` script: an error is a line and a status, not a traceback."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # it was closed before the start
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_RDWR), mode))
    _printable(sys.stdout)
    _printable(sys.stderr)
    try:
        try:
            _app()(prog_name="nearstep")
        finally:
            sys.stdout.flush()  # a full disk is an error here, not at the interpreter's end
    except ModuleNotFoundError as error:
        raise SystemExit(f"{error}: see `nearstep doctor`") from None
    except (NearstepError, OSError, RecursionError, MemoryError, OverflowError) as error:
        with suppress(OSError):  # data that could not be written are not retried
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if isinstance(error, BrokenPipeError):
            raise SystemExit(FAILED) from None
        print(f"error: {str(error) or type(error).__name__}", file=sys.stderr)
        raise SystemExit(WRONG if isinstance(error, ValueError) else FAILED) from None
