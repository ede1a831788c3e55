# amaranth: UnusedElaboratable=no
"""`nearstep rtl`: Verilog of blocks, and their list.

Amaranth is imported only when a block is generated.
"""

import importlib
import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from nearstep_hw.generator import Generator
from nearstep_spec.codec import OptionRow, check_used, from_text, make, texts_of
from nearstep_spec.codec import describe as describe_options
from nearstep_spec.errors import NearstepError

if TYPE_CHECKING:
    from amaranth.lib import wiring

__all__ = ["GENERATORS", "GeneratorError", "build", "command", "describe", "modules", "verilog"]

BLOCKS = ("fp", "updater", "dram", "axdimm", "smartssd", "pcie", "nvme", "serial", "coarse")
"""Packages with a table of generators."""

GENERATORS: dict[str, Generator] = {
    name: generator
    for block in BLOCKS
    for name, generator in importlib.import_module(
        f"nearstep_hw.{block}.generators"
    ).GENERATORS.items()
}
"""Every generator, by the name of its top module."""


class GeneratorError(NearstepError, ValueError):
    """Unknown name of a generator; the message lists the names."""


def _generator(name: str) -> Generator:
    if name not in GENERATORS:
        raise GeneratorError(f"There is no {name!r}; there are {', '.join(GENERATORS)}")
    return GENERATORS[name]


def _configured(generator: Generator, options: dict[str, Any]) -> Any:
    given = options.pop("config", None)
    if given is not None:
        return given
    check_used(generator.config, options, generator.options)
    return make(generator.config, options)


def build(name: str, **options: Any) -> "wiring.Component":
    """Make the component `name` with the options given, or a whole `config`.

    Raises
    ------
    GeneratorError, CodecError, ConfigError
    """
    generator = _generator(name)
    return generator.build(_configured(generator, options))


def modules(name: str, **options: Any) -> "dict[str, wiring.Component]":
    """Return the modules that the component instantiates, by name."""
    generator = _generator(name)
    return dict(generator.modules(_configured(generator, options)))


def verilog(name: str, **options: Any) -> str:
    """Return the complete Verilog of the component `name`; raises the errors of `build`."""
    from nearstep_hw.verilog import to_verilog

    return to_verilog(build(name, **options), name, modules(name, **options))


def describe(name: str, **options: Any) -> dict[str, object]:
    """Return name, summary, latency in cycles (None if not defined), options and ports."""
    return _described(name, build(name, **options))


def _described(name: str, component: "wiring.Component") -> dict[str, object]:
    from nearstep_hw.verilog import flat_ports

    return {
        "name": name,
        "summary": GENERATORS[name].summary,
        "latency": getattr(component, "latency", None),
        "options": [
            row.__dict__
            for row in describe_options(GENERATORS[name].config)
            if row.name in GENERATORS[name].options
        ],
        "ports": [
            {"name": port, "direction": direction, "width": width}
            for port, direction, width in flat_ports(component)
        ],
    }


def command(
    context: typer.Context,
    name: Annotated[
        str | None,
        typer.Argument(
            help="Block to generate; its options follow: adam_kernel --lanes 4. "
            "--list shows blocks; with a block, its options and ports.",
            show_default=False,
            autocompletion=lambda: list(GENERATORS),
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Verilog file (default: standard output).")
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List blocks, or one, with latencies and ports.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
    all_: Annotated[
        bool,
        typer.Option(
            "--all",
            help="Write every block with default options to the folder of --output, with "
            "register maps, FuseSoC core files and constraint stubs.",
        ),
    ] = False,
    html: Annotated[
        bool, typer.Option("--html/--no-html", help="With --all: pages of the registers.")
    ] = True,
) -> None:
    """Write plain Verilog of a block; its top module has the block's name."""
    if all_:
        _write_all(name, context.args, output, html, listed=list_ or as_json)
        return
    if not html:
        raise typer.BadParameter("--no-html is for --all")
    if name is None and not (list_ or as_json):
        raise typer.BadParameter("give the name of a block, --list or --all")
    if name is None and context.args:
        raise typer.BadParameter(f"{context.args[0]} is for one block: name it first")
    if (list_ or as_json) and output is not None:
        raise typer.BadParameter("--output is for the Verilog of a block, not for a list")
    try:
        options = {} if name is None else {"config": _config(name, context.args)}
        if list_ or as_json:
            rows = [describe(each, **options) for each in ([name] if name else GENERATORS)]
            text = json.dumps(rows, indent=2) if as_json else _table(rows, whole=name is not None)
            typer.echo(text)
            return
        if sys.stderr.isatty():
            typer.echo("Writing Verilog (the first time, Yosys compiles itself: 40 s)", err=True)
        text = verilog(cast(str, name), **options)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise typer.BadParameter(f"cannot write {output}: {error.strerror}") from error


# Options unknown to Typer are options of the block.
cast(Any, command).context_settings = {"allow_extra_args": True, "ignore_unknown_options": True}


def _write_all(
    name: str | None, arguments: Sequence[str], output: Path | None, html: bool, *, listed: bool
) -> None:
    from nearstep_hw.rtl_tree.write import TEXT, TreeError, write_tree
    from nearstep_spec.csr.export.html import HtmlError

    if name is not None or arguments:
        raise typer.BadParameter(
            f"--all writes every block as it is by default: {' '.join([name or '', *arguments])} "
            "is for one block"
        )
    if listed:
        raise typer.BadParameter("--all writes blocks, --list and --json list them")
    if output is None:
        raise typer.BadParameter("--all needs --output, the folder to write to")
    try:
        index = write_tree(output, GENERATORS, _made, html=html)
    except TreeError as error:
        raise typer.BadParameter(str(error)) from error
    except HtmlError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from None
    size = sum(row["bytes"] for row in index["files"].values())
    typer.echo(
        f"{len(index['tops'])} tops, {len(index['files'])} files, {size / 1e6:.1f} MB: "
        f"see {output / TEXT}"
    )


def _made(name: str) -> tuple[str, dict[str, object]]:
    """Return Verilog and description of a block with default options; for a worker process."""
    from amaranth.hdl import UnusedElaboratable

    from nearstep_hw.verilog import to_verilog

    # Some components are made only to read their latency.
    warnings.simplefilter("ignore", UnusedElaboratable)
    component = build(name)
    return to_verilog(component, name, modules(name)), _described(name, component)


def _config(name: str, arguments: Sequence[str]) -> Any:
    generator = _generator(name)
    texts = texts_of(generator.config, arguments)
    check_used(generator.config, texts, generator.options)
    return from_text(generator.config, texts)


def _table(rows: list[dict[str, object]], *, whole: bool) -> str:
    lines = []
    for row in rows:
        latency = "" if row["latency"] is None else f"{row['latency']} cycles"
        ports = cast(list[dict[str, object]], row["ports"])
        listed = ", ".join(f"{port['name']}[{port['width']}]" for port in ports)
        if len(ports) > 16 and not whole:
            listed = f"{len(ports)} ports"
        lines.append(f"{row['name']:16}{latency:>10}  {row['summary']}\n{'':28}{listed}")
        if whole:
            for each in cast(list[dict[str, str]], row["options"]):
                option = OptionRow(**each)
                flag = f"--{option.name.replace('_', '-')}"
                default = f" [{option.default}]" if option.default else ""
                lines.append(f"  {flag:24}{option.values}{default}\n{'':26}{option.meaning}")
    return "\n".join(lines)
