"""`nearstep platform`: descriptions of machines, and of this one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Annotated

import typer

from nearstep.cli.outcome import AsJson, print_json, print_table, reported, table_of, working
from nearstep.measure.drives import MeasureError
from nearstep_spec.cache import cache_dir, make_folder
from nearstep_spec.platform.load import PARTS, THIS, load, measured_path, parse, shipped
from nearstep_spec.platform.machine import ORIGINS, Figure, Platform, PlatformError

app = typer.Typer(help="Machines: their parts, rates, and sources of the figures.")

UNITS = (
    ("bytes_per_s", 1e9, "GB/s"),
    ("params_per_s", 1e6, "MP/s"),
    ("bytes", 1e9, "GB"),
    ("_s", 1e-6, "us"),
    ("flops", 1e12, "TFLOP/s"),
)
"""Units of figures, by a part of their names; the first match counts."""


def figures(platform: Platform) -> Iterator[tuple[str, str, Figure]]:
    """Yield part, entry and figure, for all figures of a machine."""
    for table in PARTS:
        for name, part in getattr(platform, table).items():
            for each in fields(part):
                value = getattr(part, each.name)
                if isinstance(value, Figure):
                    yield name, each.name, value
                elif each.name == "flops":
                    yield from ((name, f"flops.{dtype}", one) for dtype, one in value.items())


def complete(incomplete: str) -> list[str]:
    """Complete the name of a machine, for a shell."""
    return [name for name in (*shipped(), THIS) if name.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(
        help="A machine of the list, `this`, or a file.",
        show_default=False,
        autocompletion=complete,
    ),
]


@app.command("list")
def list_machines() -> None:
    """List the machines of the package, and this one, if it was measured."""
    rows = []
    for name in [*shipped(), *([THIS] if measured_path().is_file() else [])]:
        with reported():
            platform = load(name)
        rows.append((name, platform.title, *map(str, _origins(platform).values())))
    columns = ("name", "description", *(f"figures: {origin}" for origin in ORIGINS))
    print_table(table_of(columns, rows))


@app.command("show")
def show(
    name: Name,
    as_json: AsJson = False,
) -> None:
    """Show the parts of a machine, each figure with its origin and source."""
    with reported():
        platform = load(name)
    if as_json:
        print_json(asdict(platform))
        return
    rows = [
        (part, entry, _printed(entry, figure), figure.origin, figure.source)
        for part, entry, figure in figures(platform)
    ]
    print_table(table_of(("part", "entry", "value", "origin", "source"), rows, platform.title))
    links = [(name, " - ".join(each.ends), each.duplex) for name, each in platform.links.items()]
    print_table(table_of(("link", "ends", "duplex"), links))


@app.command("check")
def check(
    file: Annotated[Path, typer.Argument(help="A description in TOML.", show_default=False)],
) -> None:
    """Check a description: missing, unknown or invalid entries are named with their lines.

    Exit status: 1 if there are any, 2 if the file cannot be read.
    """
    with reported(wrong=(OSError, UnicodeDecodeError), failed=(PlatformError,)):
        platform = parse(file.read_text(encoding="utf-8"), str(file))
    counts = _origins(platform)
    parts = sum(len(getattr(platform, table)) for table in PARTS)
    origins = ", ".join(f"{count} {origin}" for origin, count in counts.items() if count)
    typer.echo(f"{file}: {platform.name}: {parts} parts and links, figures: {origins}")


@app.command("this")
def this(
    directory: Annotated[
        Path | None,
        typer.Option(help="Folder on the measured drive; default: the cache."),
    ] = None,
    file_mib: Annotated[int, typer.Option(min=1, help="MiB of the measured file.")] = 1024,
) -> None:
    """Measure this machine, and keep the result in the cache as the machine `this`."""
    with reported(wrong=(MeasureError,)):
        from nearstep.measure.host import Sizes, keep, measure, steps  # torch is an extra

        folder = cache_dir() if directory is None else directory
        if directory is None:
            make_folder(folder)
        with working("", total=steps() + 1) as report:
            platform = measure(folder, Sizes(file_bytes=file_mib << 20), report)
        path = keep(platform)
    typer.echo(str(path))
    show(THIS)


def _origins(platform: Platform) -> dict[str, int]:
    counted = Counter(figure.origin for _, _, figure in figures(platform))
    return {origin: counted[origin] for origin in ORIGINS}  # type: ignore[index]


def _printed(entry: str, figure: Figure) -> str:
    for part, scale, unit in UNITS:
        if part in entry:
            return f"{float(figure) / scale:.6g} {unit}"
    return f"{float(figure):g}"
